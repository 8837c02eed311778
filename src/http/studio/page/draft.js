// The draft as it is revised: one node a token, of which only those that change are touched.

/** A view of a draft's tokens. */
export class DraftView {
  constructor() {
    this.node = document.createElement("span");
    this.node.className = "draft";
    this.node.setAttribute("aria-hidden", "true"); // read aloud it would never end; what is settled is announced
    this.spans = [];
  }

  /** Shows tokens of `{ text, shade, changed }`; `text` null is a special token. */
  show(tokens) {
    while (this.spans.length > tokens.length) this.spans.pop().remove();
    let over = false;
    tokens.forEach((token, at) => {
      let span = this.spans[at];
      if (!span) {
        span = document.createElement("span");
        this.spans.push(span);
        this.node.append(span);
      }
      const text = token.text ?? "·";
      if (span.textContent !== text) span.textContent = text;
      const names = ["token"];
      if (token.shade > 0) names.push(`h${token.shade}`);
      if (token.shade < 0) names.push("guess");
      if (token.changed) names.push("changed");
      if (token.text === null) names.push("special");
      if (over) names.push("after");
      const wanted = names.join(" ");
      if (span.className !== wanted) span.className = wanted;
      if (token.text === null && token.shade <= 2) over = true;
    });
  }

  clear() {
    this.show([]);
  }
}
