// Axes and what is drawn between them. A picture is an SVG; widths are in pixels.

const MARGIN = { left: 46, right: 12, top: 24, bottom: 34 };

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.75);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) {
    out.push(Number(v.toPrecision(12)));
  }
  return out;
}

function logTicks(low, high, count) {
  const out = [];
  for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++) {
    for (const m of [1, 2, 5]) out.push(Number((m * 10 ** d).toPrecision(6)));
  }
  const inside = out.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  return inside.length >= 2 && inside.length <= Math.max(count, 7) ? inside : niceTicks(low, high, count);
}

function scaleOf({ domain, log }, from, to) {
  const [low, high] = log ? domain.map(Math.log) : domain;
  const span = high - low || 1;
  return (v) => from + (((log ? Math.log(v) : v) - low) / span) * (to - from);
}

// The range of values with some room, so that no point is on an axis.
function padded(values, share = 0.06) {
  const finite = values.filter(Number.isFinite);
  const low = Math.min(...finite), high = Math.max(...finite);
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}

// Labels with as few digits as tell all ticks apart, three at least.
function tickLabels(ticks) {
  for (let n = 3; n < 12; n++) {
    const labels = ticks.map((v) => digits(v, n));
    if (new Set(labels).size === ticks.length) return labels;
  }
  return ticks.map(String);
}

const HALF_LETTER = 3.6; // half the width of a letter in a tick's label

// spec: x and y {domain, log, label, format, ticks}, height. paint(pane) draws into pane.g with pane.X and pane.Y.
function axes(width, spec) {
  const { x, y, height = 240, label } = spec;
  const margin = { ...MARGIN, ...spec.margin };
  const right = width - margin.right, bottom = height - margin.bottom;
  const X = scaleOf(x, margin.left, right), Y = scaleOf(y, bottom, margin.top);
  const ticksOf = (axis, room, gap) => {
    const ticks = axis.ticks || (axis.log ? logTicks : niceTicks)(...axis.domain, Math.floor(room / gap));
    const labels = axis.format ? ticks.map(axis.format) : tickLabels(ticks);
    return ticks.map((v, i) => [v, String(labels[i])]);
  };
  const root = svg("svg", { width, height, role: "img", "aria-label": label });
  for (const [v, words] of ticksOf(y, bottom - margin.top, 42)) {
    root.append(
      svg("line", { class: "grid", x1: margin.left, x2: right, y1: Y(v), y2: Y(v) }),
      svg("text", { class: "tick", x: margin.left - 6, y: Y(v) + 3.5, "text-anchor": "end" }, words),
    );
  }
  for (const [v, words] of ticksOf(x, right - margin.left, 62)) {
    const middle = Math.min(X(v), width - HALF_LETTER * words.length); // a label at the edge stays inside
    root.append(
      svg("line", { class: "tickmark", x1: X(v), x2: X(v), y1: bottom, y2: bottom + 4 }),
      svg("text", { class: "tick", x: middle, y: bottom + 15, "text-anchor": "middle" }, words),
    );
  }
  root.append(
    svg("line", { class: "axis", x1: margin.left, x2: right, y1: bottom, y2: bottom }),
    svg(
      "text",
      { class: "label", x: (margin.left + right) / 2, y: height - 3, "text-anchor": "middle" },
      x.label,
    ),
    svg("text", { class: "label", x: 2, y: 11 }, y.label),
  );
  const g = svg("g");
  root.append(g);
  spec.paint({ g, X, Y, width, left: margin.left, right, top: margin.top, bottom, root });
  return root;
}

// -- marks ------------------------------------------------------------------------------------------

const at = (v) => v.toFixed(1);

function pathOf(points) {
  let pen = "M";
  return points.map(([x, y]) => {
    if (!Number.isFinite(x) || !Number.isFinite(y)) {
      pen = "M"; // a gap
      return "";
    }
    const part = `${pen}${at(x)},${at(y)}`;
    pen = "L";
    return part;
  }).join("");
}

function line(pane, points, color, attributes = {}) {
  const d = pathOf(points.map(([x, y]) => [has(x) ? pane.X(x) : NaN, has(y) ? pane.Y(y) : NaN]));
  pane.g.append(svg("path", { class: "line", d, stroke: color, ...attributes }));
}

// A staircase: each value holds until the next point.
function stairs(pane, points, color, attributes = {}) {
  const steps = points.flatMap(([x, y], i) => (i ? [[x, points[i - 1][1]], [x, y]] : [[x, y]]));
  line(pane, steps, color, attributes);
}

function band(pane, points, color, attributes = {}) {
  const up = points.map(([x, , high]) => [pane.X(x), pane.Y(high)]);
  const down = points.map(([x, low]) => [pane.X(x), pane.Y(low)]).reverse();
  pane.g.append(
    svg("path", { class: "band", d: `${pathOf([...up, ...down])}Z`, fill: color, ...attributes }),
  );
}

function markAt(kind, x, y, color, r, attributes = {}) {
  const own = { fill: color, class: "mark", ...attributes };
  if (kind === "square") {
    return svg("rect", { x: x - r * 0.9, y: y - r * 0.9, width: 1.8 * r, height: 1.8 * r, ...own });
  }
  const corners = {
    triangle: [[0, -1.2], [1.1, 0.8], [-1.1, 0.8]],
    diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
    arrow: [[0, -1.6], [1.3, 0], [0.4, 0], [0.4, 1.6], [-0.4, 1.6], [-0.4, 0], [-1.3, 0]],
  }[kind];
  if (!corners) return svg("circle", { cx: x, cy: y, r, ...own });
  return svg("polygon", {
    points: corners.map(([i, j]) => `${at(x + i * r)},${at(y + j * r)}`).join(" "),
    ...own,
  });
}

const HOLLOW = (color) => ({ class: "mark hollow", stroke: color });

// A mark with a tooltip. The area to point at is larger than the mark.
function mark(pane, kind, x, y, color, content, r = 3.6, hollow = false) {
  const node = svg(
    "g",
    { class: "point" },
    content ? svg("circle", { cx: pane.X(x), cy: pane.Y(y), r: 9, fill: "transparent" }) : null,
    markAt(kind, pane.X(x), pane.Y(y), color, r, hollow ? HOLLOW(color) : {}),
  );
  if (content) explain(node, content);
  pane.g.append(node);
}

// A named setting: a ring for the chosen one, a square frame for the trained one.
function ringAt(x, y, kind, r = 8) {
  return kind === "trained"
    ? svg("rect", { class: "ring", x: x - r, y: y - r, width: 2 * r, height: 2 * r })
    : svg("circle", { class: "ring", cx: x, cy: y, r });
}

const ring = (pane, x, y, kind) => pane.g.append(ringAt(pane.X(x), pane.Y(y), kind));

function rule(pane, y, text) {
  pane.g.append(svg("line", { class: "rule", x1: pane.left, x2: pane.right, y1: pane.Y(y), y2: pane.Y(y) }));
  if (text) {
    pane.g.append(
      svg("text", { class: "tick", x: pane.right - 2, y: pane.Y(y) - 4, "text-anchor": "end" }, text),
    );
  }
}

// A line that follows the pointer, with a tooltip for the values there.
function crosshair(pane, xs, content) {
  const hair = svg("line", { class: "hair", y1: pane.top, y2: pane.bottom, visibility: "hidden" });
  const area = svg("rect", {
    x: pane.left,
    y: pane.top,
    width: Math.max(0, pane.right - pane.left),
    height: pane.bottom - pane.top,
    fill: "transparent",
    class: "area",
  });
  const places = xs.map(pane.X);
  const follow = (event) => {
    const x = event.clientX - pane.root.getBoundingClientRect().left;
    let best = 0;
    places.forEach((p, i) => Math.abs(p - x) < Math.abs(places[best] - x) && (best = i));
    fill(hair, { x1: places[best], x2: places[best], visibility: "visible" }, []);
    tip.show(area, content(xs[best]), event.clientX, event.clientY);
  };
  area.addEventListener("pointermove", follow);
  area.addEventListener("pointerdown", follow);
  area.addEventListener("pointerleave", (event) => {
    if (!hasLeft(event)) return;
    hair.setAttribute("visibility", "hidden");
    tip.hide(area);
  });
  pane.g.append(hair, area);
}

// One bar per expert or rank. bars: [{name, value, color, tick, content}]; tick: a second value, drawn as a line.
function barChart(width, spec) {
  const { bars, top, label, xLabel, rule: dotted, height, line: cumulated } = spec;
  const every = Math.ceil(bars.length / Math.max(1, Math.floor((width - 60) / 20)));
  const x = {
    domain: [-0.5, bars.length - 0.5],
    label: xLabel,
    format: (i) => bars[i].name,
    ticks: bars.map((_, i) => i).filter((i) => i % every === 0),
  };
  const y = { domain: [0, top], format: (v) => percent(v, 0) };
  return axes(width, {
    x,
    y,
    height,
    label,
    margin: { top: 8 },
    paint(pane) {
      const w = pane.X(1) - pane.X(0), zero = pane.Y(0);
      if (has(dotted)) rule(pane, dotted);
      bars.forEach((bar, i) => {
        const left = pane.X(i - 0.5) + w * 0.12, inner = w * 0.76, y0 = pane.Y(bar.value);
        const node = svg(
          "g",
          { class: "bar", "data-value": bar.value },
          svg("rect", {
            x: pane.X(i - 0.5),
            y: pane.top,
            width: w,
            height: zero - pane.top,
            fill: "transparent",
          }),
          svg("rect", {
            class: "fill",
            x: left,
            y: y0,
            width: inner,
            height: Math.max(0, zero - y0),
            fill: bar.color,
            rx: Math.min(2, w / 6),
          }),
          has(bar.tick)
            ? svg("line", {
              class: "second",
              x1: pane.X(i - 0.5) + w * 0.04,
              x2: pane.X(i + 0.5) - w * 0.04,
              y1: pane.Y(bar.tick),
              y2: pane.Y(bar.tick),
            })
            : null,
        );
        pane.g.append(explain(node, bar.content));
      });
      if (cumulated) {
        line(pane, cumulated.map((v, i) => [i, v]), "var(--ink)", {
          "stroke-width": 1.2,
          "pointer-events": "none",
        });
      }
    },
  });
}
