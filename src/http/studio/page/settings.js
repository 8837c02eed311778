// What the reader may set, kept in the browser; the key only as long as the tab is open.

import { button, element as field, make, openPanel, toast } from "./page.js";
import { keep, recall } from "./store.js";

/** An input with an identifier. */
function input(id, attributes) {
  const made = make("input");
  made.id = id;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function labelled(text, ...nodes) {
  const label = make("label");
  label.append(text, ...nodes);
  return label;
}

/** A slider, and its value beside its name. */
function slider(id, text, range) {
  const value = make("output");
  value.id = `${id}-value`;
  value.htmlFor = id;
  const label = labelled(`${text} `, value, input(id, { type: "range", ...range }));
  label.htmlFor = id;
  return label;
}

/** Fields for whole numbers: what each takes, and how that is said. Nothing in one means what its placeholder says. */
const WHOLE = {
  "max-tokens": { takes: (text) => /^\d+$/.test(text) && Number(text) > 0, told: "Most tokens: a whole number, 1 or more" },
  seed: { takes: (text) => /^-?\d{1,15}$/.test(text), told: "Seed: a whole number of at most 15 digits" },
};

/** Whether a field for a whole number holds something else, which is marked. */
function isWrong(id) {
  const box = field(id), text = box.value.trim();
  const wrong = box.validity.badInput || (text !== "" && !WHOLE[id].takes(text));
  box.setAttribute("aria-invalid", String(wrong));
  box.title = wrong ? WHOLE[id].told : "";
  return wrong;
}

/** What both pages let the reader set. `written` is what they write. */
function panel(written) {
  const steps = slider("steps", "Most steps a canvas", { min: 1, max: 48, step: 1 });
  steps.id = "steps-row";
  const name = labelled("Seed");
  name.htmlFor = "seed";
  const digits = { type: "text", inputmode: "numeric", maxlength: 16, placeholder: "a new one each time" };
  const last = button("last", "plain", () => {});
  last.id = "seed-again";
  last.title = `Use the seed of the last ${written}`;
  const joined = make("span", "joined");
  joined.append(input("seed", digits), last);
  const seed = make("div", "field");
  seed.append(name, joined);
  const about = make("p", "hint");
  about.id = "about";
  field("settings").append(
    make("h2", "", "How it writes"),
    slider("temperature", "Temperature", { min: 0, max: 2, step: 0.05 }),
    steps,
    labelled("Most tokens", input("max-tokens", { type: "number", min: 1, inputmode: "numeric" })),
    seed,
    make("h2", "", "Access"),
    labelled("API key", input("key", { type: "password", autocomplete: "off", placeholder: "only if the server asks for one" })),
    about,
  );
}

/** The settings panel, which may lack what a page has no use for. */
export class Settings {
  /** `written` is what the page writes; `scope` what settings are kept for, without one they are kept for each backend. */
  constructor(written, scope) {
    this.scope = scope;
    panel(written);
    const { temperature, steps } = { temperature: field("temperature"), steps: field("steps") };
    for (const slider of [temperature, steps]) {
      slider.addEventListener("input", () => this.told());
    }
    for (const id of ["system", "thinking", "temperature", "steps", "max-tokens", "seed"]) {
      field(id)?.addEventListener("change", () => this.save());
    }
    for (const id of Object.keys(WHOLE)) field(id).addEventListener("input", () => isWrong(id));
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
    field("max-tokens").placeholder = this.usual;
    field("max-tokens").value = kept.maxTokens ?? this.usual;
    if (field("system")) field("system").value = kept.system ?? "";
    field("seed").value = kept.seed ?? "";
    if (field("thinking")) {
      field("thinking").checked = kept.thinking ?? false;
      field("thinking-row").hidden = !backend.thinking;
    }
    field("steps-row").hidden = backend.kind !== "diffusion";
    field("about").textContent = backend.about ?? "";
    Object.keys(WHOLE).forEach(isWrong);
    this.told();
  }

  told() {
    field("temperature-value").textContent = Number(field("temperature").value).toFixed(2);
    field("steps-value").textContent = field("steps").value;
  }

  /** Tokens of an answer where the reader says nothing. */
  get usual() {
    return this.backend.defaults?.max_tokens ?? 512;
  }

  /** Whether a field holds what cannot be sent; the reader is shown which. */
  refused() {
    const wrong = Object.keys(WHOLE).filter(isWrong)[0];
    if (!wrong) return false;
    openPanel("settings", true);
    field(wrong).focus();
    toast(WHOLE[wrong].told);
    return true;
  }

  save() {
    if (!this.backend || Object.keys(WHOLE).some(isWrong)) return;
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
      maxTokens: Number(field("max-tokens").value) || this.usual,
      system: field("system")?.value.trim() ?? "",
      thinking: field("thinking")?.checked ?? false,
      seed: seed === "" ? undefined : Number(seed),
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
