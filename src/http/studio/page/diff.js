// Before and after, line by line, with the words that differ.

import { make } from "./page.js";

/** Products of lines up to which the shortest difference is looked for; beyond, all lines in question count as changed. */
const MOST = 4_000_000;
/** Unchanged lines that are shown beside changed ones. */
const CONTEXT = 3;

/** How many items two lists have in common at their start and, behind that, at their end. */
function shared(a, b) {
  const most = Math.min(a.length, b.length);
  let start = 0;
  while (start < most && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < most - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  return { start, end };
}

/** The difference of two lists as runs of `[kind, item]`: `same`, `del` or `ins`. */
export function difference(a, b) {
  const { start, end } = shared(a, b);
  const [x, y] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const middle = [];
  if (x.length * y.length > MOST) {
    middle.push(...x.map((item) => ["del", item]), ...y.map((item) => ["ins", item]));
  } else {
    // Lengths of the longest common subsequences of what is behind each pair of places.
    const width = y.length + 1;
    const common = new Uint16Array((x.length + 1) * width);
    for (let i = x.length - 1; i >= 0; i -= 1) {
      for (let j = y.length - 1; j >= 0; j -= 1) {
        common[i * width + j] =
          x[i] === y[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
      }
    }
    let [i, j] = [0, 0];
    while (i < x.length || j < y.length) {
      if (i < x.length && j < y.length && x[i] === y[j]) {
        middle.push(["same", x[i]]);
        i += 1;
        j += 1;
      } else if (i < x.length && (j === y.length || common[(i + 1) * width + j] >= common[i * width + j + 1])) {
        middle.push(["del", x[i]]);
        i += 1;
      } else {
        middle.push(["ins", y[j]]);
        j += 1;
      }
    }
  }
  const same = (items) => items.map((item) => ["same", item]);
  return [...same(a.slice(0, start)), ...middle, ...same(a.slice(a.length - end))];
}

/** The words of a line, and what stands between them. */
const words = (line) => line.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/** A line whose words are marked where they differ from those of the line it replaces. */
function marked(line, other) {
  const node = make("span", "line");
  if (other === undefined) {
    node.textContent = line;
    return node;
  }
  const [mine, theirs] = [words(line), words(other)];
  const { start, end } = shared(mine, theirs);
  const part = (from, to) => mine.slice(from, to).join("");
  const changed = part(start, mine.length - end);
  node.append(part(0, start));
  if (changed) node.append(make("b", "", changed));
  node.append(part(mine.length - end));
  return node;
}

function row(kind, number, line, other) {
  const node = make({ same: "div", del: "del", ins: "ins" }[kind]);
  const sign = make("span", "sign", { same: "", del: "−", ins: "+" }[kind]);
  const count = make("span", "number", String(number));
  sign.setAttribute("aria-hidden", "true");
  count.setAttribute("aria-hidden", "true");
  if (kind !== "same") node.append(make("span", "quiet", kind === "del" ? "removed: " : "added: "));
  node.append(count, sign, marked(line, other));
  return node;
}

/** Rows that show how `before` becomes `after`; unchanged lines far from any change are folded. */
export function diffRows(before, after) {
  const runs = difference(before.split("\n"), after.split("\n"));
  const near = runs.map(([kind], at) => kind !== "same" || runs.slice(Math.max(0, at - CONTEXT), at + CONTEXT + 1).some(([other]) => other !== "same"));
  const rows = [];
  let [old, fresh, folded] = [0, 0, 0];
  const fold = () => {
    if (folded) rows.push(make("p", "fold", `${folded} unchanged line${folded > 1 ? "s" : ""}`));
    folded = 0;
  };
  for (let at = 0; at < runs.length; at += 1) {
    if (runs[at][0] === "same") {
      old += 1;
      fresh += 1;
      if (near[at]) {
        fold();
        rows.push(row("same", fresh, runs[at][1]));
      } else folded += 1;
      continue;
    }
    fold();
    // A block of changes: removed lines first, each beside the one that replaces it.
    const [gone, come] = [[], []];
    for (; at < runs.length && runs[at][0] !== "same"; at += 1) (runs[at][0] === "del" ? gone : come).push(runs[at][1]);
    at -= 1;
    gone.forEach((line, place) => rows.push(row("del", (old += 1), line, come[place])));
    come.forEach((line, place) => rows.push(row("ins", (fresh += 1), line, gone[place])));
  }
  fold();
  return rows;
}
