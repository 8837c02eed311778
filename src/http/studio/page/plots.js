// Small plots as SVG, made of nodes only.

const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** A line with its area; `points` are `{ index, value }`. Its `show(index)` moves the marker. */
export function line(points, label) {
  const width = 136, height = 32;
  const svg = node("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, preserveAspectRatio: "none" });
  const top = Math.max(...points.map((point) => point.value), 1e-6);
  const x = (at) => (points.length < 2 ? width : (at / (points.length - 1)) * width);
  const y = (value) => height - 2 - (value / top) * (height - 4);
  const path = points.map((point, at) => `${at ? "L" : "M"}${x(at).toFixed(1)} ${y(point.value).toFixed(1)}`).join("");
  svg.append(
    node("path", { class: "area", d: `${path}L${width} ${height}L0 ${height}Z` }),
    node("path", { class: "line", d: path }),
  );
  const now = node("line", { class: "now", x1: width, x2: width, y1: 0, y2: height });
  svg.append(now);
  svg.show = (index) => {
    let at = points.findLastIndex((point) => point.index <= index);
    at = Math.max(at, 0);
    now.setAttribute("x1", x(at));
    now.setAttribute("x2", x(at));
  };
  return svg;
}

/** The last values as bars, the present one darkest. */
export function bars(values, label) {
  const width = 51, height = 18, most = 8;
  const shown = values.slice(-most);
  const svg = node("svg", { class: "plot small", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const top = Math.max(...shown, 1e-6), each = width / most;
  shown.forEach((value, at) => {
    const tall = Math.max(1.5, (value / top) * height);
    svg.append(node("rect", { x: at * each, y: height - tall, width: each - 1.5, height: tall, rx: 1 }));
  });
  return svg;
}
