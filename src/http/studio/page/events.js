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

/** Posts `body` as JSON and yields `{ name, data }` for every event until the stream ends. */
export async function* post(url, body, { key, signal }) {
  const response = await fetch(url, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw new ApiError(await refusal(response), response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
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
