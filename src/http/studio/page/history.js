// What the text was before: typing is remembered in runs, edits one by one.

/** Milliseconds within which keys belong together. */
const RUN = 800;
/** Most texts that are remembered. */
const MOST = 500;

/** The texts there were, each with its selection: `{ text, start, end }`. */
export class History {
  constructor(first) {
    this.states = [first];
    this.at = 0;
    this.typed = -Infinity;
  }

  get now() {
    return this.states[this.at];
  }

  /** A new text. Typed ones of one run replace each other. */
  push(state, { typing = false, time = Date.now() } = {}) {
    if (state.text === this.now.text) {
      this.states[this.at] = state;
      return;
    }
    const runs = typing && time - this.typed < RUN && this.at > 0;
    this.states.length = this.at + 1;
    if (runs) this.states[this.at] = state;
    else this.states.push(state);
    if (this.states.length > MOST) this.states.shift();
    this.at = this.states.length - 1;
    this.typed = typing ? time : -Infinity;
  }

  get undoable() {
    return this.at > 0;
  }

  get redoable() {
    return this.at < this.states.length - 1;
  }

  /** Goes back (-1) or forth (1); null where there is nothing. */
  go(by) {
    const state = this.states[this.at + by];
    if (!state) return null;
    this.at += by;
    this.typed = -Infinity;
    return state;
  }
}
