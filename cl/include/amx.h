// The registers of a processor's matrix unit (AMX): tiles of 16 rows of 64 bytes.
//
// OpenCL C has no words for tiles, but the CPU compilers of Intel and PoCL take inline assembly: operands "r" for addresses,
// and "X" of type float16 for vector registers; other constraints, other vector types and clobbers of registers are refused
// or miscompiled. No code of compiler or runtime touches tile registers, so nothing needs to be told of them, and volatile
// statements with "memory" stay in order. A work-item configures and releases them itself (some 55 ns). The process must
// have asked the kernel for them before any work-item runs (src/device/matrix_unit.rs).

// A processor's local memory is like any other.
#define AS_GLOBAL(p) ((global float*)(size_t)(p))

#define TILES_OFF __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, p, step) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((ulong)(p)), "r"((long)(step)) : "memory")
#define TILE_STORE(t, p, step) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((ulong)(p)), "r"((long)(step)) : "memory")
