// Server-sent events over fetch: the browser's EventSource can neither POST nor send a key.

/** An error the server told, with its status. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

/** Headers of a request with an optional key. */
export function headers(key) {
  return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
}

/** The message of an error's answer, whatever shape it has. */
async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/** In a reader's words, what became of a key that was refused. */
const keyRefused = (key) =>
  key
    ? "The server does not take this API key; see Access in the settings."
    : "The server asks for an API key: put it in under Access in the settings.";

/** What is waited for, or `told` in place of the browser's own words where there is no connection. */
async function connected(waited, told) {
  try {
    return await waited;
  } catch (error) {
    throw error instanceof TypeError ? new Error(told) : error;
  }
}

/**
 * Posts `body()` as `post` does. What is refused at once is posted once more, made anew, if `exchanged()` finds that the
 * server has another model than was known, which can do other things.
 */
export async function* postToModel(url, body, { exchanged, ...options }) {
  try {
    return yield* post(url, body(), options);
  } catch (error) {
    if (![400, 404].includes(error.status) || !(await exchanged())) throw error;
  }
  yield* post(url, body(), options);
}

/** Posts `body` as JSON and yields `{ name, data }` for every event until the stream ends. */
async function* post(url, body, { key, signal }) {
  const request = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await connected(fetch(url, request), "The server cannot be reached; it may have ended, or be about to start.");
  if (response.status === 401) throw new ApiError(keyRefused(key), 401);
  if (!response.ok) throw new ApiError(await refusal(response), response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await connected(reader.read(), "The connection broke off before this was whole.");
    if (done) return;
    held += value;
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const event = parse(held.slice(0, end));
      held = held.slice(end + 2);
      if (event) yield event;
    }
  }
}

/** One event's lines; null for a comment. */
function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null;
}
