// One answer on the page: its thoughts, its text as it settles, the scrubber and the figures.

import { DraftView } from "./draft.js";
import { button, facts, make, seconds } from "./page.js";
import { bars } from "./plots.js";
import { Recording } from "./recording.js";
import { replay } from "./replay.js";
import { isOver } from "./store.js";

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
  }

  /** The answer is remembered: what it took, or that it is not whole. */
  rest() {
    this.finish();
    if (!isOver(this.answer)) this.below.prepend(make("p", "hint", "Not whole: its page was left, or is still writing it."));
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
    const past = (key) => [...this.earlier.map((answer) => answer.stats?.[key]), stats[key]].filter(Number.isFinite);
    const trend = (key, label) => {
      const values = past(key);
      return values.length > 1 ? bars(values, label) : null;
    };
    const measured = (key, told) => Number.isFinite(stats[key]) && told(stats[key]);
    const denoised = stats.denoising_steps !== undefined;
    const list = facts(make("dl", "facts"), [
      ["steps", stats.denoising_steps, denoised && trend("denoising_steps", "Steps of the last answers")],
      ["passes", !denoised && stats.passes],
      ["canvases", stats.canvases],
      ["tokens a pass", measured("tokens_per_pass", (rate) => rate.toFixed(2)), trend("tokens_per_pass", "Tokens a pass of the last answers")],
      denoised
        ? ["first draft", measured("first_draft_s", seconds), trend("first_draft_s", "Seconds to the first draft of the last answers")]
        : ["first text", measured("first_token_s", seconds), trend("first_token_s", "Seconds to the first text of the last answers")],
      ["answer", measured("elapsed_s", seconds), trend("elapsed_s", "Seconds of the last answers")],
      ["tok/s", measured("tokens_per_s", (rate) => rate.toFixed(1)), trend("tokens_per_s", "Tokens a second of the last answers")],
      ["tokens", usage.completion_tokens],
      ["seed", this.answer.seed],
      ["ended by", this.answer.finish !== "stop" && (this.answer.finish || undefined)],
    ]);
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
