// Chats, kept in this browser only: one list for each backend. Where the browser keeps nothing (a private window), they
// live as long as the page.

const NAME = "axe-studio", TABLE = "chats";

function request(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** Whether all of an answer is there, or will never be. */
export const isOver = (answer) => Boolean(answer.stats || answer.error);

/** `known`, as it is kept, with one turn of `chat` in it as it is now. Other tabs may have added turns, which stay. */
function joined(known, chat, turn) {
  if (!known) return chat;
  const at = known.turns.findIndex(({ id }) => id === turn.id);
  if (at >= 0 && isOver(known.turns[at].answer) && !isOver(turn.answer)) return known;
  const turns = at < 0 ? [...known.turns, turn] : known.turns.with(at, turn);
  return { ...known, title: known.title || chat.title, at: chat.at, turns };
}

/**
 * Opens the store. `list` gives the chats of a backend; `put` keeps one turn of a chat, and resolves to all turns that the
 * chat has then; `remove` forgets a chat.
 */
export async function open() {
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: "id" }).createIndex("backend", "backend");
    const base = await request(asked);
    const table = (mode) => base.transaction(TABLE, mode).objectStore(TABLE);
    return {
      list: (backend) => request(table("readonly").index("backend").getAll(backend)),
      put: async (chat, turn) => {
        const place = table("readwrite");
        const whole = joined(await request(place.get(chat.id)), chat, turn);
        await request(place.put(whole));
        return whole.turns;
      },
      remove: (id) => request(table("readwrite").delete(id)),
    };
  } catch {
    const chats = new Map();
    return {
      list: async (backend) => [...chats.values()].filter((chat) => chat.backend === backend),
      put: async (chat, turn) => {
        const whole = joined(chats.get(chat.id), chat, turn);
        chats.set(chat.id, structuredClone(whole));
        return whole.turns;
      },
      remove: async (id) => void chats.delete(id),
    };
  }
}

/** A setting kept in the browser, or `otherwise`. */
export function recall(key, otherwise) {
  try {
    const kept = localStorage.getItem(`axe.${key}`);
    return kept === null ? otherwise : JSON.parse(kept);
  } catch {
    return otherwise;
  }
}

/** Keeps a setting; whether it could be kept. */
export function keep(key, value) {
  try {
    localStorage.setItem(`axe.${key}`, JSON.stringify(value));
    return true;
  } catch {
    // A full or forbidden store costs only the memory of it.
    return false;
  }
}

/** The beginning of the names of turns whose page was left while they were written. */
const LEFT = "left.";

/** Keeps a turn as its page is left: there is no time for anything that must be waited for. */
export function leave(chat, turn) {
  const left = { chat: { ...chat, turns: [turn] }, turn };
  if (keep(LEFT + turn.id, left)) return;
  // Without its drafts it is small.
  turn.answer.frames = [];
  keep(LEFT + turn.id, left);
}

/** Puts turns whose pages were left into the store. */
export async function takeLeft(store) {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(`axe.${LEFT}`));
  } catch {
    // A forbidden store has none.
  }
  for (const name of names) {
    const left = recall(name.slice("axe.".length), null);
    try {
      if (left) await store.put(left.chat, left.turn);
      localStorage.removeItem(name);
    } catch {
      // It is tried again when a page is opened next.
    }
  }
}
