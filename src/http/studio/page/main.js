// The chat page: chats on the left, the conversation in the middle, settings on the right.

import { AnswerView } from "./answer.js";
import { headers, postToModel } from "./events.js";
import { announcer, backends as offered, element, exchanged, openPanel, state, toast, watch as look } from "./page.js";
import { Settings } from "./settings.js";
import { isOver, keep, leave, open, recall, takeLeft } from "./store.js";

/** Questions to begin with, for models that chat. */
const STARTERS = ["What is the capital of France?", "List the months of the year.", "Write three lines about rain."];

const settings = new Settings("answer");
const announce = announcer();
let store, backends = [], backend = null, chats = [], chat = null, running = null, served = null;
/** The turn that is being written, with its chat. */
let writing = null;

// Chats

const newId = () => crypto.randomUUID?.() ?? String(Math.random()).slice(2);

function blank() {
  return { id: newId(), backend: backend.id, title: "", at: Date.now(), turns: [] };
}

/** The messages of a chat as the API takes them; answers that failed or never began are left out with their question. */
function messages(turns) {
  return turns
    .filter(({ answer }) => answer && !answer.error && (answer.text || isOver(answer)))
    .flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer.text },
    ]);
}

function paintList() {
  const list = element("chat-list");
  list.replaceChildren(
    ...chats.map((each) => {
      const item = document.createElement("li");
      const choose = document.createElement("button");
      choose.type = "button";
      choose.textContent = each.title || "New chat";
      if (each === chat) choose.setAttribute("aria-current", "true");
      choose.addEventListener("click", () => show(each));
      item.append(choose);
      return item;
    }),
  );
  element("forget").disabled = element("export").disabled = !chat?.turns.length;
}

function show(which) {
  if (running) return toast("An answer is being written; stop it first.");
  chat = which;
  keep(`chat.${backend.id}`, chat.id);
  paintTurns(chat.turns);
  element("welcome").hidden = chat.turns.length > 0;
  paintList();
  element("chats").classList.remove("open");
  element("open-chats").setAttribute("aria-expanded", "false");
  bottom(true);
}

function paintTurns(turns) {
  element("messages").replaceChildren();
  turns.forEach((turn, at) => paintTurn(turn, turns.slice(0, at)).rest());
}

function paintTurn(turn, before) {
  const question = document.createElement("li");
  question.className = "message user";
  question.textContent = turn.question;
  const view = new AnswerView(turn.answer, { earlier: before.map((each) => each.answer) });
  element("messages").append(question, view.node);
  return view;
}

/** Keeps the end in sight, unless the reader has scrolled up. */
function bottom(always) {
  const talk = element("talk");
  if (always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160) talk.scrollTop = talk.scrollHeight;
}

async function useBackend(id) {
  backend = backends.find((each) => each.id === id) ?? backends[0];
  element("backend").value = backend.id;
  keep("backend", backend.id);
  settings.use(backend);
  element("welcome-text").textContent =
    backend.kind === "diffusion"
      ? "Ask something. The answer begins as noise and is revised all at once, until every word stands."
      : backend.id === "local"
        ? "Ask something. The model guesses several tokens ahead, and keeps those it would have written itself."
        : "This backend sends finished text only: no drafts to watch.";
  element("starters").replaceChildren(
    ...(backend.chat ? STARTERS : []).map((text) => {
      const item = document.createElement("li");
      const ask = document.createElement("button");
      ask.type = "button";
      ask.textContent = text;
      ask.addEventListener("click", () => settings.refused() || send(text));
      item.append(ask);
      return item;
    }),
  );
  chats = (await store.list(backend.id)).sort((a, b) => b.at - a.at);
  const before = recall(`chat.${backend.id}`, null);
  show(chats.find((each) => each.id === before) ?? newChat());
}

function newChat() {
  const empty = chats.find((each) => !each.turns.length);
  if (empty) return empty;
  const made = blank();
  chats.unshift(made);
  return made;
}

// An answer

async function send(text) {
  const question = text.trim();
  if (!question || running || !backend) return;
  running = new AbortController();
  const answer = { text: "", reasoning: "", frames: [] };
  const turn = { id: newId(), question, answer };
  writing = { chat, turn };
  element("welcome").hidden = true;
  element("send").hidden = true;
  element("stop").hidden = false;
  state("busy", "writing");
  announce("Writing.");
  const known = JSON.stringify(chat.turns);
  chat.turns.push(turn);
  chat.title ||= question.slice(0, 60);
  chat.at = Date.now();
  await keepTurn(writing);
  const before = chat.turns.slice(0, chat.turns.indexOf(turn));
  // What another tab has added to this chat, or written on in it, belongs to what is asked about.
  if (JSON.stringify(before) !== known) paintTurns(before);
  // As it was asked for: of the server's number, 64 bits without a sign, a script keeps 53.
  const { seed } = settings.values();
  const body = () => settings.request([...messages(before), { role: "user", content: question }]);
  const options = { key: settings.key, signal: running.signal, exchanged: takeUp };
  const view = paintTurn(turn, before);
  view.begin();
  paintList();
  bottom(true);
  try {
    let over = false;
    for await (const { name, data } of postToModel("/chat", body, options)) {
      if (name === "prefill") view.prefill(data);
      else if (name === "draft") view.drafted(data);
      else if (name === "commit") view.committed(data);
      else if (name === "done") {
        Object.assign(answer, { stats: data.stats, usage: data.usage, finish: data.finish_reason, seed: seed ?? data.seed });
        settings.lastSeed = answer.seed;
        over = true;
      } else if (name === "error") throw new Error(data.error.message);
      bottom(false);
    }
    if (!over) throw new Error("the server closed the connection before the answer was complete");
    announce(answer.text);
  } catch (error) {
    if (error.name === "AbortError") {
      answer.finish = "stopped";
      answer.stats ??= {};
      announce("Stopped.");
    } else {
      answer.error = error.message;
      if (error.status === 401) openPanel("settings", true);
    }
  }
  view.finish();
  await keepTurn(writing);
  running = writing = null;
  element("send").hidden = false;
  element("stop").hidden = true;
  bottom(false);
  paintList();
  watch();
}

/** Takes up what the server has in place of the model that was asked, if it is another one; whether it is. */
async function takeUp() {
  const now = await exchanged(backend, () => headers(settings.key));
  if (!now) return false;
  backend = now;
  settings.use(now);
  return true;
}

/** Keeps a turn as it is now, and takes over those that other tabs have added to its chat. */
async function keepTurn({ chat, turn }) {
  try {
    chat.turns = (await store.put(chat, turn)).map((each) => (each.id === turn.id ? turn : each));
  } catch (error) {
    toast(`This chat could not be kept: ${error.message}`);
  }
}

// The server's state

async function watch() {
  if (running || document.hidden) return;
  const name = await look(() => backend?.device || "ready");
  // Another model can do other things.
  if (name && served && name !== served && !(await list())) return;
  served = name ?? served;
}

/** Asks what models there are, and takes up the one that was used last; not while an answer is being written. */
async function list() {
  const told = await offered(() => headers(settings.key));
  if (running) return false;
  backends = told;
  element("backend").replaceChildren(...backends.map((each) => new Option(each.name, each.id)));
  await useBackend(recall("backend", backends[0].id));
  return true;
}

async function connect() {
  await list();
  await watch();
}

// Buttons and keys

for (const id of ["chats", "settings"]) element(`open-${id}`).addEventListener("click", () => openPanel(id));
element("talk").addEventListener("pointerdown", () => ["chats", "settings"].forEach((id) => openPanel(id, false)));
element("backend").addEventListener("change", (event) => {
  if (running) {
    event.target.value = backend.id;
    return toast("An answer is being written; stop it first.");
  }
  useBackend(event.target.value);
});
element("new-chat").addEventListener("click", () => {
  if (!backend) return;
  show(newChat());
  element("prompt").focus();
});
element("forget").addEventListener("click", async () => {
  if (running || !chat) return;
  const gone = chat;
  await store.remove(gone.id);
  chats = chats.filter((each) => each !== gone);
  show(chats[0] ?? newChat());
});
element("export").addEventListener("click", () => {
  if (!chat) return;
  const file = new Blob([JSON.stringify({ format: "axe-studio-chat", version: 1, chat }, null, 1)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `${(chat.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});

const field = element("prompt");
function grow() {
  field.rows = Math.min(10, Math.max(1, field.value.split("\n").length));
}
field.addEventListener("input", grow);
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("composer").requestSubmit();
  }
});
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = field.value;
  if (!backend) {
    toast(`Not yet: ${element("state").textContent.trim()}. What you wrote stays here.`);
    return;
  }
  if (settings.refused()) return;
  field.value = "";
  grow();
  send(text);
});
element("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (running) running.abort();
    else ["chats", "settings"].forEach((id) => openPanel(id, false));
  }
});
document.addEventListener("visibilitychange", () => {
  // Phones end pages that are out of sight without a word.
  if (writing && document.hidden) keepTurn(writing);
  watch();
});
addEventListener("pagehide", () => {
  if (writing) leave(writing.chat, writing.turn);
});
setInterval(watch, 5000);

store = await open();
await takeLeft(store);
await connect();
field.focus({ preventScroll: true });
