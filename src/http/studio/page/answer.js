// One answer on the page: its thoughts, its text as it settles, the scrubber and the figures.

import { DraftView } from "./draft.js";
import { button, make, seconds } from "./page.js";
import { bars } from "./plots.js";
import { Recording } from "./recording.js";
import { replay } from "./replay.js";

/** The view of one answer, live or remembered. */
export class AnswerView {
  /** `answer` is what is kept: `{ text, reasoning, frames, stats, finish, error, seed }`. */
  constructor(answer, { earlier = [] } = {}) {
    this.answer = answer;
    this.earlier = earlier;
    this.recording = new Recording(answer.frames);
    this.node = make("li", "message answer");
    this.node.setAttribute("aria-label", "Answer");
    this.thought = make("details", "thought");
    this.thought.append(make("summary", "", "Thinking"), make("div"));
    this.text = make("div", "text");
    this.settled = make("span", "settled");
    this.draft = new DraftView();
    this.text.append(this.settled, this.draft.node);
    this.below = make("div", "below");
    this.node.append(this.thought, this.text, this.below);
    this.paint(answer.text, answer.reasoning);
    if (answer.stats || answer.error) this.finish();
  }

  paint(text, reasoning) {
    this.settled.textContent = text;
    this.thought.hidden = !reasoning;
    this.thought.lastChild.textContent = reasoning;
  }

  /** The answer begins. */
  begin() {
    this.node.classList.add("live");
    this.progress = make("progress", "progress");
    this.progress.max = 1;
    this.progress.setAttribute("aria-label", "Prompt read");
    this.node.prepend(this.progress);
  }

  prefill({ done, total }) {
    this.progress.value = total ? done / total : 1;
    if (done >= total) this.progress.hidden = true;
  }

  drafted(draft) {
    this.progress.hidden = true;
    this.draft.show(this.recording.draft(draft));
  }

  committed({ text = "", reasoning = "" }) {
    this.progress.hidden = true;
    this.recording.commit({ text, reasoning });
    this.answer.text += text;
    this.answer.reasoning += reasoning;
    this.draft.clear();
    this.paint(this.answer.text, this.answer.reasoning);
    this.settled.classList.remove("fresh");
    void this.settled.offsetWidth; // so that the animation starts anew
    this.settled.classList.add("fresh");
  }

  /** The answer is over: `answer.stats`, `finish` or `error` are filled. */
  finish() {
    this.node.classList.remove("live");
    this.progress?.remove();
    this.draft.clear();
    this.answer.frames = this.recording.frames;
    this.below.replaceChildren();
    if (this.answer.error) {
      const problem = make("p", "problem", this.answer.error);
      problem.setAttribute("role", "alert");
      this.below.append(problem);
    }
    const drafts = this.recording.frames.some((frame) => frame.d !== undefined);
    if (drafts && this.recording.length > 1) this.scrubber();
    if (this.answer.stats) this.figures();
  }

  scrubber() {
    const show = (moment) => {
      this.paint(moment ? moment.text : this.answer.text, moment ? moment.reasoning : this.answer.reasoning);
      this.draft.show(moment ? moment.tokens : []);
    };
    this.below.append(replay(this.recording, show));
  }

  figures() {
    const { stats, usage = {} } = this.answer;
    const list = make("dl", "facts");
    const fact = (name, value, plot) => {
      const pair = make("div");
      const dd = make("dd", "", value);
      if (plot) dd.append(plot);
      pair.append(make("dt", "", name), dd);
      list.append(pair);
    };
    const past = (key) => [...this.earlier.map((answer) => answer.stats?.[key]), stats[key]].filter(Number.isFinite);
    const trend = (key, label) => {
      const values = past(key);
      return values.length > 1 ? bars(values, label) : null;
    };
    if (stats.denoising_steps !== undefined) fact("steps", String(stats.denoising_steps), trend("denoising_steps", "Steps of the last answers"));
    else if (stats.passes !== undefined) fact("passes", String(stats.passes), null);
    if (stats.canvases !== undefined) fact("canvases", String(stats.canvases));
    if (Number.isFinite(stats.tokens_per_pass)) fact("tokens a pass", stats.tokens_per_pass.toFixed(2), trend("tokens_per_pass", "Tokens a pass of the last answers"));
    if (Number.isFinite(stats.first_draft_s)) fact("first draft", seconds(stats.first_draft_s), trend("first_draft_s", "Seconds to the first draft of the last answers"));
    if (Number.isFinite(stats.elapsed_s)) fact("answer", seconds(stats.elapsed_s), trend("elapsed_s", "Seconds of the last answers"));
    if (Number.isFinite(stats.tokens_per_s)) fact("tok/s", stats.tokens_per_s.toFixed(1), trend("tokens_per_s", "Tokens a second of the last answers"));
    if (usage.completion_tokens !== undefined) fact("tokens", String(usage.completion_tokens));
    if (this.answer.seed !== undefined) fact("seed", String(this.answer.seed));
    if (this.answer.finish && this.answer.finish !== "stop") fact("ended by", this.answer.finish);
    const tools = make("div", "tools");
    const copy = button("Copy", "plain", async () => {
      try {
        await navigator.clipboard.writeText(this.answer.text);
        copy.textContent = "Copied";
      } catch {
        copy.textContent = "Not allowed here";
      }
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    tools.append(copy);
    const row = make("div", "result");
    row.append(list, tools);
    this.below.append(row);
  }
}
