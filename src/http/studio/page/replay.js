// The scrubber: goes back to any draft of a recording, and plays them.

import { button, make } from "./page.js";
import { line } from "./plots.js";

/** The row with the scrubber. `show` is given what was on the screen at a moment, null for what came of it at last. */
export function replay(recording, show) {
  const row = make("div", "replay");
  const last = recording.length - 1;
  const range = make("input");
  Object.assign(range, { type: "range", min: 0, max: last, value: last });
  range.setAttribute("aria-label", "Replay of the draft");
  const told = make("output", "", "");
  let timer = null, plot = null;
  const go = (index) => {
    range.value = index;
    const moment = index < last ? recording.at(index) : null;
    show(moment);
    const { c, s, d } = moment?.frame ?? {};
    told.textContent = !moment ? "as it stands" : s ? `canvas ${c + 1} · step ${s}` : d ? `guess ${index + 1}` : "committed";
    plot?.show(index);
    range.setAttribute("aria-valuetext", told.textContent);
  };
  const halt = () => {
    clearInterval(timer);
    timer = null;
    play.setAttribute("aria-label", "Play the drafts");
    play.textContent = "▶";
  };
  const play = button("▶", "icon", () => {
    if (timer) return halt();
    let at = Number(range.value) >= last ? 0 : Number(range.value);
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "Pause");
    timer = setInterval(() => {
      go(at);
      if (at >= last) halt();
      at += 1;
    }, Math.max(60, Math.min(260, 6000 / last)));
    go(at);
  });
  play.setAttribute("aria-label", "Play the drafts");
  range.addEventListener("input", () => {
    halt();
    go(Number(range.value));
  });
  row.append(play, range, told);
  const points = recording.certainty();
  if (points.length > 1) {
    plot = line(points, "Mean entropy of the draft, step by step");
    row.append(plot);
  }
  go(last);
  // Taken off the page, it plays no more.
  row.halt = halt;
  return row;
}
