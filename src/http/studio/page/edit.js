// The editor: a sheet of paper, an instruction below it, and in between what the model has written, to be taken or not.

import { headers, postToModel } from "./events.js";
import { History } from "./history.js";
import { announcer, backends, element, exchanged, facts, make, openPanel, seconds, state, toast, watch } from "./page.js";
import { Paper } from "./paper.js";
import { Recording } from "./recording.js";
import { replay } from "./replay.js";
import { Settings } from "./settings.js";
import { keep, recall } from "./store.js";

/** Texts to begin with; what stands between the brackets is selected. */
const SAMPLES = [
  { name: "Missing months", text: "January, February, March,⟦⟧ August, September, October, November, December.", instruction: "Name the months." },
  { name: "A gap in a sentence", text: "The ⟦⟧ is Paris.", instruction: "What is the capital of France?" },
  {
    name: "A function to fill in",
    text: 'def is_palindrome(text):\n    """Whether text reads the same from both ends; case and spaces do not matter."""\n    ⟦pass⟧\n\n\nprint(is_palindrome("Never odd or even"))\n',
    instruction: "Implement this function.",
    language: "python",
  },
];

const settings = new Settings("edit", "edit");
const announce = announcer();
const paper = new Paper();
let backend = null, running = null, reviewed = null, history = null;

// Code points, which the server counts, and UTF-16 units, which the browser does.

const points = (text) => [...text].length;
const units = (text, count) => [...text].slice(0, count).join("").length;

// The text

function mode() {
  return document.querySelector("input[name=mode]:checked").value;
}

/** Whether the text is on the paper, to be typed in. */
const idle = () => !running && !reviewed;

function remember(typing) {
  history.push({ text: paper.text, ...paper.selection }, { typing });
  keep("edit.text", paper.text);
  told();
}

/** Everything that follows from text, selection and state. */
function told() {
  const { start, end } = paper.selection;
  const text = paper.text;
  const line = text.slice(0, start).split("\n").length;
  element("place").textContent =
    mode() === "whole"
      ? `whole text, ${points(text)} characters`
      : start < end
        ? `${points(text.slice(start, end))} characters selected, line ${line}`
        : `at the cursor, line ${line}`;
  element("undo").disabled = !idle() || !history.undoable;
  element("redo").disabled = !idle() || !history.redoable;
  element("clear").disabled = !idle() || !text;
  element("copy").disabled = !text;
  element("welcome").hidden = !idle() || text !== "";
  element("send").hidden = Boolean(running);
  element("send").disabled = Boolean(reviewed);
  element("stop").hidden = !running;
  element("review").hidden = !reviewed;
}

function put(state) {
  paper.put(state);
  paper.reveal(state.start);
  keep("edit.text", state.text);
  told();
}

function travel(by) {
  if (!idle()) return;
  const state = history.go(by);
  if (state) put(state);
}

function load({ text, instruction, language = "" }) {
  const start = text.indexOf("⟦");
  const end = text.indexOf("⟧") - 1;
  history.push({ text: text.replace("⟦", "").replace("⟧", ""), start, end });
  put(history.now);
  element("instruction").value = instruction;
  element("language").value = language;
  element("instruction").focus();
  paper.paint();
}

// An edit

function request(seed) {
  const { temperature, steps, maxTokens, ...values } = settings.values();
  const { start, end } = paper.selection;
  const text = paper.text;
  const body = { code: text, mode: mode(), instruction: element("instruction").value.trim(), temperature, max_tokens: maxTokens };
  if (body.mode === "selection") body.selection = { start: points(text.slice(0, start)), end: points(text.slice(0, end)) };
  const language = element("language").value.trim();
  if (language) body.language = language;
  if (backend.kind === "diffusion") body.steps = steps;
  if (seed ?? values.seed !== undefined) body.seed = seed ?? values.seed;
  return body;
}

function problem(text) {
  element("problem").textContent = text ?? "";
  element("problem").hidden = !text;
}

async function edit(seed) {
  if (running) return;
  if (!backend) return problem(`Not yet: ${element("state").textContent.trim()}.`);
  if (settings.refused()) return;
  reviewed?.row?.halt();
  reviewed = null;
  problem();
  const before = paper.text;
  const { start, end } = mode() === "whole" ? { start: 0, end: before.length } : paper.selection;
  const recording = new Recording([]);
  const view = paper.drafted(before.slice(0, start), before.slice(start, end), before.slice(end));
  running = new AbortController();
  // As it was asked for: of the server's number, 64 bits without a sign, a script keeps 53.
  const asked = seed ?? settings.values().seed;
  const body = () => request(seed);
  const options = { key: settings.key, signal: running.signal, exchanged: takeUp };
  state("busy", "writing");
  announce("Writing.");
  told();
  let done = null, written = "";
  try {
    for await (const { name, data } of postToModel("/edit", body, options)) {
      if (name === "draft") view.draft(recording.draft(data));
      else if (name === "commit") {
        recording.commit({ text: data.text });
        view.settle((written += data.text));
      } else if (name === "done") done = { ...data, seed: asked ?? data.seed };
      else if (name === "error") throw new Error(data.error.message);
    }
    if (!done) throw new Error("the server closed the connection before the edit was complete");
    settings.lastSeed = done.seed;
  } catch (error) {
    if (error.name === "AbortError") {
      toast("Stopped. Nothing was changed.");
      announce("Stopped.");
    } else {
      problem(error.message);
      if (error.status === 401) openPanel("settings", true);
    }
  }
  running = null;
  look();
  if (done) review({ before, done, recording, view });
  else back();
}

/** The text again, to be typed in. */
function back() {
  reviewed?.row?.halt();
  reviewed = null;
  paper.typed();
  told();
}

function review({ before, done, recording, view }) {
  if (done.document === before) {
    back();
    toast("The model would leave it as it is.");
    return;
  }
  const drafts = recording.frames.some((frame) => frame.d !== undefined);
  const row = drafts && recording.length > 1 ? replay(recording, (moment) => (moment ? view.moment(moment) : paper.show(["diff"]))) : null;
  element("replay").replaceChildren(...(row ? [row] : []));
  reviewed = { done, row };
  paper.compared(before, done.document);
  const { stats, usage } = done;
  element("facts").replaceChildren();
  facts(element("facts"), [
    ["steps", stats.denoising_steps ?? stats.passes],
    ["tokens", usage.completion_tokens],
    ["tok/s", Number.isFinite(stats.tokens_per_s) && stats.tokens_per_s.toFixed(1)],
    ["time", Number.isFinite(stats.elapsed_s) && seconds(stats.elapsed_s)],
    ["seed", done.seed],
    ["ended by", done.finish_reason !== "stop" && done.finish_reason],
  ]);
  told();
  announce(`Changed: ${done.text}`);
  element("accept").focus();
}

function accept() {
  if (!reviewed) return;
  const { document: text, start, end } = reviewed.done;
  history.push({ text, start: units(text, start), end: units(text, end) });
  back();
  put(history.now);
  announce("Accepted.");
  element("instruction").focus();
  paper.paint();
}

function discard() {
  if (!reviewed) return;
  back();
  announce("Discarded.");
  element("instruction").focus();
  paper.paint();
}

// Buttons and keys

const ready = () => backend?.device || "ready";

paper.field.addEventListener("input", () => {
  remember(true);
  paper.paint();
  paper.reveal(paper.selection.end);
});
// Where browsers would undo by themselves, they would undo half of it.
paper.field.addEventListener("beforeinput", (event) => {
  if (event.inputType !== "historyUndo" && event.inputType !== "historyRedo") return;
  event.preventDefault();
  travel(event.inputType === "historyUndo" ? -1 : 1);
});
for (const moment of ["focus", "blur"]) paper.field.addEventListener(moment, () => paper.paint());
document.addEventListener("selectionchange", () => {
  if (history && document.activeElement === paper.field) told();
});
for (const choice of document.querySelectorAll("input[name=mode]")) choice.addEventListener("change", told);
element("undo").addEventListener("click", () => travel(-1));
element("redo").addEventListener("click", () => travel(1));
element("clear").addEventListener("click", () => {
  history.push({ text: "", start: 0, end: 0 });
  put(history.now);
  paper.field.focus();
});
element("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(reviewed ? reviewed.done.document : paper.text);
    toast("Copied.");
  } catch {
    toast("The browser does not allow it here.");
  }
});
element("accept").addEventListener("click", accept);
element("discard").addEventListener("click", discard);
element("again").addEventListener("click", () => edit(Math.floor(Math.random() * 2 ** 32)));
element("stop").addEventListener("click", () => running?.abort());
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!reviewed) edit();
});
element("open-settings").addEventListener("click", () => openPanel("settings"));
paper.root.addEventListener("pointerdown", () => openPanel("settings", false));
const wish = element("instruction");
wish.addEventListener("input", () => (wish.rows = Math.min(6, Math.max(1, wish.value.split("\n").length))));
document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") {
    if (running) running.abort();
    else if (reviewed) discard();
    else openPanel("settings", false);
  } else if (command && event.key === "Enter") {
    event.preventDefault();
    if (reviewed) accept();
    else edit();
  } else if (command && !event.altKey && ["z", "y"].includes(event.key.toLowerCase()) && document.activeElement !== wish) {
    event.preventDefault();
    travel(event.key.toLowerCase() === "y" || event.shiftKey ? 1 : -1);
  }
});
let served = null;

/** Asks what the model can do; not while an edit is being written. */
async function ask() {
  const known = await backends(() => headers(settings.key));
  if (running) return false;
  backend = known.find((each) => each.id === "local") ?? known[0];
  settings.use(backend);
  return true;
}

/** Takes up what the server has in place of the model that was asked, if it is another one; whether it is. */
async function takeUp() {
  const now = await exchanged(backend, () => headers(settings.key));
  if (!now) return false;
  backend = now;
  settings.use(now);
  return true;
}

/** Looks at the server's state, and at what another model can do. */
async function look() {
  const name = await watch(ready);
  if (name && served && name !== served && !(await ask())) return;
  served = name ?? served;
}

setInterval(() => {
  if (!running && !document.hidden) look();
}, 5000);

history = new History({ text: recall("edit.text", ""), start: 0, end: 0 });
put(history.now);
paper.typed();
element("samples").replaceChildren(
  ...SAMPLES.map((sample) => {
    const item = make("li");
    const choose = make("button", "", sample.name);
    choose.type = "button";
    choose.addEventListener("click", () => load(sample));
    item.append(choose);
    return item;
  }),
);
await ask();
await look();
