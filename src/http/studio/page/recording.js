// What happened to an answer, step by step, small enough to keep: each frame holds only the tokens that changed.

/** Ten shades for an entropy in nats: 0 is certain, 9 knows nothing. */
export function shade(entropy) {
  if (!(entropy > 0.004)) return 0;
  return Math.min(9, 1 + Math.floor(Math.sqrt(entropy) * 3.2));
}

/** Records drafts and commits of one answer, and plays them back. */
export class Recording {
  constructor(frames = []) {
    this.frames = frames; // {c: canvas, s: step, n: tokens, d: [index, text, shade]…} or {t: committed text, r: reasoning}
    this.last = [];
    this.entropies = [];
  }

  /** Adds a draft; returns its tokens as `{ text, shade, changed }`. */
  draft({ canvas = 0, step = 0, tokens, entropy = [] }) {
    const shades = tokens.map((_, at) => (entropy.length ? shade(entropy[at]) : -1));
    const changes = [];
    tokens.forEach((text, at) => {
      const before = this.last[at];
      if (!before || before[0] !== text || before[1] !== shades[at]) changes.push([at, text, shades[at]]);
    });
    const frame = { c: canvas, s: step, n: tokens.length, d: changes };
    if (entropy.length) frame.e = Number((entropy.reduce((sum, e) => sum + e, 0) / entropy.length).toFixed(4));
    this.frames.push(frame);
    const view = tokens.map((text, at) => ({ text, shade: shades[at], changed: !this.last[at] || this.last[at][0] !== text }));
    this.last = tokens.map((text, at) => [text, shades[at]]);
    return view;
  }

  /** Adds committed text; the next draft begins from nothing. */
  commit({ text = "", reasoning = "" }) {
    this.frames.push({ t: text, r: reasoning });
    this.last = [];
  }

  /** How many moments can be shown. */
  get length() {
    return this.frames.length;
  }

  /** What was on the screen after frame `index`: settled text and the draft's tokens. */
  at(index) {
    let text = "", reasoning = "", tokens = [], frame = null;
    for (let i = 0; i <= index && i < this.frames.length; i++) {
      frame = this.frames[i];
      if (frame.d === undefined) {
        text += frame.t;
        reasoning += frame.r;
        tokens = [];
        continue;
      }
      tokens = tokens.slice(0, frame.n).map((token) => ({ ...token, changed: false }));
      for (const [at, piece, heat] of frame.d) {
        const changed = !tokens[at] || tokens[at].text !== piece;
        tokens[at] = { text: piece, shade: heat, changed };
      }
    }
    return { text, reasoning, tokens, frame };
  }

  /** Mean entropy of each draft that has one, with its frame: what the plot shows. */
  certainty() {
    return this.frames.flatMap((frame, index) => (frame.e === undefined ? [] : [{ index, value: frame.e }]));
  }
}
