// Many launches as one. A *phase* is what a launch would be, with the same work-items. Work-groups of one work-item each
// take some of a phase's work-items, do them, take more, and go on to the next phase when all are done.
//
// All that groups share is one word of four 16-bit parts: the run, the phase that is open, how many shares of it have been
// taken, and how many are done. To take one is one atomic addition, whose old value says which it is, and of which phase;
// who has done the last one opens the next phase. A group that finds none left waits, holding nothing, and leaves when
// that takes too long: another may begin in its place. So no group needs another one to have begun or to be there still,
// one alone could do everything, and one that the system has set aside keeps nobody from anything but the share that it
// has taken.
//
// Who does a work-item, and when, is no part of any result: it is the same as of launches.

#if !defined(__opencl_c_atomic_order_acq_rel) || !defined(__opencl_c_atomic_scope_device)
#error "no atomics that order memory between work-groups"
#endif

#define ONE_TAKEN ((ulong)1 << 16)
#define ONE_DONE ((ulong)1)
#define RUN(word) ((uint)((word) >> 48))
#define PHASE(word) ((int)((word) >> 32) & 0xffff)
#define TAKEN(word) ((int)((word) >> 16) & 0xffff)
#define DONE(word) ((int)(word) & 0xffff)
#define OPENED(run, phase) ((ulong)(run) << 48 | (ulong)(phase) << 32)

// What a phase's entry in the table begins with; its kernel's arguments follow.
#define ENTRY_KERNEL 0
#define ENTRY_SHARES 1
#define ENTRY_EACH 2  // work-items of a share
#define ENTRY_SIZES 3 // work-items along each of three dimensions
#define ENTRY_ARGS 6

// Asks the processor to go easy on a loop that waits.
inline void relax(void) {
#ifdef HOST_PAUSE
    __asm__ volatile("pause");
#endif
}

inline ulong look(volatile global atomic_ulong* word) {
    return atomic_load_explicit(word, memory_order_acquire, memory_scope_device);
}

// The work-items of a share. again: the group has just done another share of the same phase.
inline void do_share(global const ulong* entry, int share, int again, int start, local uchar* scratch) {
    const int3 of = (int3)((int)entry[ENTRY_SIZES], (int)entry[ENTRY_SIZES + 1], (int)entry[ENTRY_SIZES + 2]);
    const int each = (int)entry[ENTRY_EACH], from = share * each, until = min(from + each, of.s0 * of.s1 * of.s2);
    for (int item = from; item < until; item++) {
        const int3 at = (int3)(item % of.s0, item / of.s0 % of.s1, item / of.s0 / of.s1);
        call((int)entry[ENTRY_KERNEL], entry + ENTRY_ARGS, at, of, again || item > from, start, scratch);
    }
}

// table: an entry of TABLE_WORDS words for each phase: numbers as they are, memory by its address, local memory by its
// place in `scratch`. word: zero at first. run: another number than the last time, below 2^16. start: position of the first
// row. patience: looks at the word before a waiting group leaves. hollow: take all shares and do none, to see what that
// costs. Global size: as many groups as may begin, all in all.
EXPLICIT_VECTOR kernel void run_phases(global const ulong* table, volatile global atomic_ulong* word, int phases,
                                       int patience, int hollow, int start, uint run, local uchar* scratch) {
    ulong seen = look(word);
    // The first to come closes what an earlier run has left.
    while (RUN(seen) != run)
        if (atomic_compare_exchange_strong_explicit(word, &seen, OPENED(run, 0), memory_order_acq_rel,
                                                    memory_order_acquire, memory_scope_device))
            seen = OPENED(run, 0);
    int last = -1, waited = 0;
    while (PHASE(seen) < phases) {
        if (TAKEN(seen) >= (int)table[(size_t)PHASE(seen) * TABLE_WORDS + ENTRY_SHARES]) {
            if (++waited > patience) return;
            relax();
            seen = look(word);
            continue;
        }
        waited = 0;
        seen = atomic_fetch_add_explicit(word, ONE_TAKEN, memory_order_acq_rel, memory_scope_device);
        // By now another phase may be open, or none be left of this one.
        const int phase = PHASE(seen), share = TAKEN(seen);
        if (phase >= phases) return;
        global const ulong* entry = table + (size_t)phase * TABLE_WORDS;
        const int shares = (int)entry[ENTRY_SHARES];
        if (share < shares) {
            if (!hollow) do_share(entry, share, phase == last, start, scratch);
            last = phase;
            seen = atomic_fetch_add_explicit(word, ONE_DONE, memory_order_acq_rel, memory_scope_device) + ONE_DONE;
            if (DONE(seen) == shares) {
                seen = OPENED(run, phase + 1);
                atomic_store_explicit(word, seen, memory_order_release, memory_scope_device);
            }
        } else {
            seen = look(word);
        }
    }
}

// Where memory lies for kernels.
EXPLICIT_VECTOR kernel void address_of(global const uchar* memory, global ulong* addresses, int at) {
    addresses[at] = (ulong)memory;
}
