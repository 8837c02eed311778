// The sheet: the text as it is typed, with line numbers and what is selected; or its draft; or what changed.

import { diffRows } from "./diff.js";
import { DraftView } from "./draft.js";
import { element, make } from "./page.js";

/** Pixels that stay between a place that is brought into sight and the edge. */
const MARGIN = 48;

/** The paper with all that may lie on it. */
export class Paper {
  constructor() {
    this.root = element("paper");
    this.field = element("code");
    this.backdrop = element("backdrop");
    this.lines = [];
  }

  get text() {
    return this.field.value;
  }

  /** What is selected, in UTF-16 units. */
  get selection() {
    const { selectionStart: start, selectionEnd: end } = this.field;
    return { start, end };
  }

  /** Puts a text on the paper, and selects a part of it. */
  put({ text, start, end }) {
    if (this.field.value !== text) this.field.value = text;
    this.field.setSelectionRange(start, end);
    this.paint();
  }

  /** Line numbers and the mark of the selection, which browsers hide once the field is left. Touches what changed only. */
  paint() {
    const { start, end } = this.selection;
    const left = document.activeElement !== this.field;
    let place = 0;
    const lines = this.text.split("\n");
    while (this.lines.length > lines.length) this.lines.pop().node.remove();
    lines.forEach((line, at) => {
      const [from, to] = [Math.max(start, place) - place, Math.min(end, place + line.length) - place];
      // A mark lies on the line where the selection does; a cursor on one line.
      const shown = left && from <= to && from <= line.length && to >= 0 && (start < end ? from < to : true);
      const key = shown ? `${from}-${to}` : "";
      const known = this.lines[at];
      if (!known || known.line !== line || known.key !== key) {
        const node = known?.node ?? this.backdrop.appendChild(make("div"));
        node.replaceChildren(line.slice(0, shown ? from : undefined));
        if (shown) node.append(make("mark", from === to ? "cursor" : "", line.slice(from, to)), line.slice(to));
        this.lines[at] = { node, line, key };
      }
      place += line.length + 1;
    });
  }

  /** Brings a place of the text into sight: the field shows all of its text, so it has nothing to scroll, and the paper has. */
  reveal(place) {
    let left = place;
    const line = this.lines.find(({ line }) => left <= line.length || ((left -= line.length + 1), false));
    if (!line) return;
    const range = document.createRange();
    range.selectNodeContents(line.node);
    const texts = document.createTreeWalker(line.node, NodeFilter.SHOW_TEXT);
    for (let text; (text = texts.nextNode()); left -= text.length) {
      if (left > text.length) continue;
      range.setStart(text, left);
      range.collapse(true);
      break;
    }
    const { top, bottom } = range.getClientRects()[0] ?? line.node.getBoundingClientRect();
    const paper = this.root.getBoundingClientRect();
    if (top < paper.top) this.root.scrollTop -= paper.top - top + MARGIN;
    else if (bottom > paper.bottom) this.root.scrollTop += bottom - paper.bottom + MARGIN;
  }

  show(what) {
    for (const id of ["code", "backdrop", "draft", "diff"]) element(id).hidden = !what.includes(id);
  }

  /** The text as it is typed. */
  typed() {
    this.show(["code", "backdrop"]);
    this.paint();
    this.reveal(this.selection.start);
  }

  /** A part of the text as it is being written. Returns the view that its drafts go to, and moments of its recording. */
  drafted(before, part, after) {
    const [settled, draft, old] = [make("span", "settled"), new DraftView(), make("span", "old", part)];
    const gap = make("span", "gap");
    gap.append(settled, draft.node, old);
    element("draft").replaceChildren(make("span", "around", before), gap, make("span", "around", after));
    this.show(["draft"]);
    gap.scrollIntoView({ block: "nearest" });
    return {
      draft: (tokens) => {
        old.remove();
        draft.show(tokens);
      },
      settle: (text) => {
        old.remove();
        draft.clear();
        settled.textContent = text;
      },
      moment: ({ text, tokens }) => {
        settled.textContent = text;
        draft.show(tokens);
        this.show(["draft"]);
        gap.scrollIntoView({ block: "nearest" });
      },
    };
  }

  /** What an edit changed. */
  compared(before, after) {
    element("diff").replaceChildren(...diffRows(before, after));
    this.show(["diff"]);
    element("diff").querySelector("ins, del")?.scrollIntoView({ block: "center" });
  }
}
