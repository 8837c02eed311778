// What the reader may set, kept in the browser; the key only as long as the tab is open.

import { keep, recall } from "./store.js";

const field = (id) => document.getElementById(id);

/** The settings panel, which may lack what a page has no use for. */
export class Settings {
  /** `scope` is what settings are kept for; without one they are kept for each backend. */
  constructor(scope) {
    this.scope = scope;
    const { temperature, steps } = { temperature: field("temperature"), steps: field("steps") };
    for (const slider of [temperature, steps]) {
      slider.addEventListener("input", () => this.told());
    }
    for (const id of ["system", "thinking", "temperature", "steps", "max-tokens", "seed"]) {
      field(id)?.addEventListener("change", () => this.save());
    }
    field("key").value = sessionStorage.getItem("axe.key") ?? "";
    field("key").addEventListener("change", () => sessionStorage.setItem("axe.key", field("key").value));
    field("seed-again").addEventListener("click", () => {
      if (this.lastSeed === undefined) return;
      field("seed").value = this.lastSeed;
      this.save();
    });
  }

  /** Under which name the settings are kept. */
  get place() {
    return `settings.${this.scope ?? this.backend.id}`;
  }

  /** Takes over what `backend` can and wants. */
  use(backend) {
    this.backend = backend;
    const kept = recall(this.place, {});
    const { defaults = {} } = backend;
    field("temperature").value = kept.temperature ?? defaults.temperature ?? 1;
    field("steps").max = defaults.steps ?? 48;
    field("steps").value = kept.steps ?? defaults.steps ?? 48;
    field("max-tokens").value = kept.maxTokens ?? defaults.max_tokens ?? 512;
    if (field("system")) field("system").value = kept.system ?? "";
    field("seed").value = kept.seed ?? "";
    if (field("thinking")) {
      field("thinking").checked = kept.thinking ?? false;
      field("thinking-row").hidden = !backend.thinking;
    }
    field("steps-row").hidden = backend.kind !== "diffusion";
    field("about").textContent = backend.about ?? "";
    this.told();
  }

  told() {
    field("temperature-value").textContent = Number(field("temperature").value).toFixed(2);
    field("steps-value").textContent = field("steps").value;
  }

  save() {
    if (!this.backend) return;
    const { temperature, steps, maxTokens, system, seed, thinking } = this.values();
    keep(this.place, { temperature, steps, maxTokens, system, seed: seed ?? "", thinking });
  }

  get key() {
    return field("key").value.trim();
  }

  values() {
    const seed = field("seed").value.trim();
    return {
      temperature: Number(field("temperature").value),
      steps: Number(field("steps").value),
      maxTokens: Math.max(1, Number(field("max-tokens").value) || 512),
      system: field("system")?.value.trim() ?? "",
      thinking: field("thinking")?.checked ?? false,
      seed: /^\d+$/.test(seed) ? Number(seed) : undefined,
    };
  }

  /** The body of a request to `/chat` that continues `messages`. */
  request(messages) {
    const { temperature, steps, maxTokens, system, thinking, seed } = this.values();
    const body = {
      backend: this.backend.id,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      temperature,
      max_tokens: maxTokens,
    };
    if (this.backend.kind === "diffusion") body.steps = steps;
    if (this.backend.thinking) body.thinking = thinking;
    if (seed !== undefined) body.seed = seed;
    return body;
  }
}
