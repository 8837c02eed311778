// What both pages have: elements by their names, the server's state, notes to the reader.

export const element = (id) => document.getElementById(id);

/** A node with a class and a text. */
export function make(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** A button that does something. */
export function button(label, className, act) {
  const node = make("button", className, label);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

/** What is known of a result: names, values and, for some, small plots. Values that are not known are left out. */
export function facts(list, known) {
  for (const [name, value, plot] of known) {
    if (value === undefined || value === null || value === false) continue;
    const pair = make("div"), told = make("dd", "", String(value));
    if (plot) told.append(plot);
    pair.append(make("dt", "", name), told);
    list.append(pair);
  }
  return list;
}

/** Makes a place whose text screen readers say; returns what says it. */
export function announcer() {
  const place = make("p", "quiet");
  place.setAttribute("aria-live", "polite");
  document.body.append(place);
  return (text) => (place.textContent = text);
}

/** Shows the server's state. */
export function state(name, text) {
  element("state").dataset.state = name;
  element("state").lastElementChild.textContent = text;
}

/** A short note. */
export function toast(text) {
  document.querySelector(".toast")?.remove();
  const note = make("p", "toast", text);
  note.setAttribute("role", "status");
  document.body.append(note);
  setTimeout(() => note.remove(), 3500);
}

/** Asks whether the server is ready, and shows it; returns the name of the model that is, if one is. */
export async function watch(ready) {
  try {
    const answer = await fetch("/ready");
    const told = await answer.json();
    if (answer.ok) {
      state("ready", ready());
      return told.model;
    }
    state("starting", told.error ?? told.what ?? told.status ?? "starting");
  } catch {
    state("down", "no connection");
  }
}

/** The models there are, once the server tells; `headers` are asked for each time. */
export async function backends(headers) {
  for (let asked = false; ; ) {
    try {
      const answer = await fetch("/studio/backends", { headers: headers() });
      if (answer.ok) return (await answer.json()).backends;
      const told = await answer.json().catch(() => ({}));
      state("starting", answer.status === 401 ? "an API key is needed" : (told.error?.message ?? "starting"));
      // The place for the key, once: whoever closes it has seen it.
      if (answer.status === 401 && !asked) {
        asked = true;
        openPanel("settings", true);
      }
    } catch {
      state("down", "no connection");
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

/** What `backend` is now, if a reload has made it another one; `headers` as above. */
export async function exchanged(backend, headers) {
  const now = (await backends(headers)).find(({ id }) => id === backend.id);
  return now && JSON.stringify(now) !== JSON.stringify(backend) ? now : null;
}

/** Opens or closes a panel, or does the other of the two. */
export function openPanel(id, wanted) {
  const opened = element(id).classList.toggle("open", wanted);
  element(`open-${id}`).setAttribute("aria-expanded", String(opened));
}

/** Seconds in words. */
export function seconds(value) {
  if (value < 0.1) return `${(1000 * value).toFixed(1)} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}
