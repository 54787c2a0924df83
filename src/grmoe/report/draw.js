// Elements, numbers as text, and the tooltip. Text from the data only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// -- numbers ----------------------------------------------------------------------------------------

const has = (value) => value !== null && value !== undefined;
const fixed = (value, digits) => (has(value) ? value.toFixed(digits).replace("-", "−") : "–");
const percent = (value, digits = 1) => (has(value) ? `${fixed(100 * value, digits)} %` : "–");
const signed = (value) => (value >= 0 ? "+" : "") + percent(value, 2);
const grouped = (value) => (has(value) ? Math.round(value).toLocaleString("en-US") : "–");
const digits = (value, n = 3) => (has(value) ? String(Number(value.toPrecision(n))).replace("-", "−") : "–");

// 1234567 → "1.23 M".
function short(value) {
  if (!has(value)) return "–";
  const power = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${digits(value / 1000 ** power)} ${["", "k", "M", "G", "T"][power]}`.trim();
}

const clipped = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

// One α, the values of a few layers, or the range of many.
function sayAlphas(alphas) {
  if (new Set(alphas).size === 1) return digits(alphas[0]);
  if (alphas.length <= 6) return alphas.map((a) => digits(a)).join(", ");
  return `${digits(Math.min(...alphas))} to ${digits(Math.max(...alphas))}`;
}

function saySelection({ kind, tau, k }) {
  if (kind === "dense") return "all experts";
  if (kind === "own") return "the router's own rule";
  if (kind === "topk") return `top-${k}`;
  if (kind === "mass") return `mass ${digits(tau)}, at most ${k}`;
  return kind === "at_least" ? `weight ≥ ${digits(tau)}, at most ${k}` : `probability ≥ ${digits(tau)}`;
}

// -- colours ----------------------------------------------------------------------------------------

// Runs and families have colours of the style sheet, and different marks and dashes.
const MARKS = ["circle", "square", "triangle", "diamond"];
const DASHES = [null, "6 3", "2 3", "8 3 2 3"];
const seriesColor = (i) => `var(--c${i % 6})`;

// Experts: eight colours that colour-blind readers can tell apart (Okabe and Ito). For more experts, hues a golden
// angle apart.
const EXPERTS = [
  "0,114,178", "230,159,0", "0,158,115", "204,121,167", "213,94,0", "86,180,233", "150,140,30", "120,120,130",
];

function expertColor(e, N, strength = 1) {
  if (N <= EXPERTS.length) return `rgba(${EXPERTS[e]},${strength.toFixed(3)})`;
  return `hsla(${(e * 137.508) % 360},${e % 2 ? 75 : 55}%,${e % 3 === 1 ? 62 : 48}%,${strength.toFixed(3)})`;
}

// -- the tooltip ------------------------------------------------------------------------------------

const tip = {
  node: null,
  owner: null,
  show(owner, content, x, y) {
    this.node = document.getElementById("tip");
    this.owner = owner;
    this.node.replaceChildren(...[content].flat());
    this.node.hidden = false;
    this.move(x, y);
  },
  // Beside the pointer, inside the window.
  move(x, y) {
    if (!this.owner) return;
    const { offsetWidth: w, offsetHeight: h } = this.node;
    const { clientWidth: W, clientHeight: H } = document.documentElement;
    const left = Math.max(6, Math.min(x + 14, W - w - 6));
    const top = y + 16 + h < H ? y + 16 : Math.max(6, y - h - 12);
    this.node.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  },
  // When the page scrolls, the tooltip moves with a focused element. The pointer has left any other element.
  follow() {
    if (!this.owner) return;
    const box = this.owner.getBoundingClientRect();
    if (this.owner === document.activeElement) this.move(box.left, box.bottom);
    else this.hide();
  },
  hide(owner) {
    if (owner && owner !== this.owner) return;
    if (this.node) this.node.hidden = true;
    this.owner = null;
  },
};

// Lifting a finger does not hide the tooltip. Tapping elsewhere does.
const hasLeft = (event) => event.pointerType !== "touch";

// Shows a tooltip when the node is pointed at or tapped. Keyboards get the same numbers from tables: a listener for focus
// would make each of a hundred marks a stop of the Tab key.
function explain(node, content) {
  const follow = ({ clientX: x, clientY: y }) =>
    tip.owner === node ? tip.move(x, y) : tip.show(node, content(), x, y);
  // Also when the pointer moves: scrolling may have hidden the tooltip.
  for (const kind of ["pointerenter", "pointermove", "click"]) node.addEventListener(kind, follow);
  node.addEventListener("pointerleave", (event) => hasLeft(event) && tip.hide(node));
  return node;
}

document.addEventListener("pointerdown", (event) => {
  if (tip.owner && !tip.owner.contains(event.target)) tip.hide();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && tip.hide());
document.addEventListener("scroll", () => tip.follow(), { passive: true });

// Lines of a tooltip: "name  value", with a colour before the name where given.
const tipTitle = (text) => el("div", { class: "tip-title" }, text);
const tipRow = (name, value, color) =>
  el(
    "div",
    { class: "tip-row" },
    color ? el("i", { class: "swatch", style: { background: color } }) : null,
    el("span", {}, name),
    el("b", {}, value),
  );

// -- tables and legends -----------------------------------------------------------------------------

// The first cell of a row is its heading. A wide table scrolls by itself, the page does not.
function table(headings, rows, attributes = {}) {
  const head = el("tr", {}, headings.map((h) => el("th", { scope: "col" }, h)));
  const body = rows.map((row) => {
    const [first, ...rest] = row.cells || row;
    return el(
      "tr",
      { class: row.class },
      el("th", { scope: "row" }, first),
      rest.map((c) => el("td", {}, c)),
    );
  });
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes.label },
    el("table", { class: attributes.class }, el("thead", {}, head), el("tbody", {}, body)),
  );
}

function legend(entries) {
  return el(
    "ul",
    { class: "legend" },
    entries.map(({ name, color, mark, dash, ring, hollow }) =>
      el(
        "li",
        {},
        svg(
          "svg",
          { width: 26, height: 12, "aria-hidden": "true" },
          mark && !ring
            ? svg("line", {
              x1: 1,
              x2: 25,
              y1: 6,
              y2: 6,
              stroke: color,
              "stroke-dasharray": dash,
              "stroke-width": 1.6,
            })
            : null,
          ring
            ? ringAt(13, 6, ring, 4.5)
            : mark
            ? markAt(mark, 13, 6, color, 3.4, hollow ? HOLLOW(color) : {})
            : svg("rect", { x: 4, y: 1, width: 18, height: 10, fill: color, rx: 2 }),
        ),
        name,
      )
    ),
  );
}

// A figure with its caption. draw(width) makes the picture for the width there is.
function figure(caption, draw, attributes = {}) {
  const plot = el("div", { class: "plot" });
  const node = el("figure", attributes, el("figcaption", {}, caption), plot);
  let width = 0;
  const redraw = () => width > 40 && plot.replaceChildren(draw(width));
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width) return;
    width = now;
    redraw();
  }).observe(plot);
  node.redraw = redraw;
  return node;
}

function note({ text, command }) {
  return el("p", { class: "note" }, text, command ? [" Get it with ", el("code", {}, command)] : null);
}

const fold = (title, ...children) => el("details", {}, el("summary", {}, title), ...children);

// A run's notes on some sections, with its name where several runs are shown.
const notesOf = (run, sections, named = false) =>
  run.notes
    .filter((n) => sections.includes(n.section))
    .map((n) => note({ ...n, text: named ? `${run.name}: ${n.text}` : n.text }));
