// Chats, kept in this browser only: one list for each backend. Where the browser keeps nothing (a private window), they
// live as long as the page.

const NAME = "axe-studio", TABLE = "chats";

function request(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** Opens the store. */
export async function open() {
  try {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE, { keyPath: "id" }).createIndex("backend", "backend");
    const base = await request(asked);
    const table = (mode) => base.transaction(TABLE, mode).objectStore(TABLE);
    return {
      list: (backend) => request(table("readonly").index("backend").getAll(backend)),
      put: (chat) => request(table("readwrite").put(chat)),
      remove: (id) => request(table("readwrite").delete(id)),
    };
  } catch {
    const chats = new Map();
    return {
      list: async (backend) => [...chats.values()].filter((chat) => chat.backend === backend),
      put: async (chat) => void chats.set(chat.id, structuredClone(chat)),
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

/** Keeps a setting. */
export function keep(key, value) {
  try {
    localStorage.setItem(`axe.${key}`, JSON.stringify(value));
  } catch {
    // A full or forbidden store costs only the memory of it.
  }
}
