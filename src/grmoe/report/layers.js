// What the gates of every layer do at the dial's setting, or at the α and selection set here.

const FEW = 4; // layers that get one card each; with more, one card for the chosen layer and an overview
const CURVE = Array.from({ length: 25 }, (_, i) => 10 ** (i / 12 - 1)); // α of the curves

// Whether a certified band excludes half of all entropies or more. Otherwise it is not shown.
const bandTells = ({ lower, upper }, N) => upper - lower <= Math.log(N) / 2;
const BAND = "Certified: proved bounds on the entropy, from the range of the logits alone. ";

function layersView(run, state) {
  const gates = gatesOf(run);
  const controls = selectionControls(run, state);
  const total = el("p", { class: "total", "aria-live": "polite" });
  let stats = [];
  const cards = gates.length <= FEW ? gates.map((_, i) => layerCard(run, i, state, () => stats[i])) : [];
  const holder = el("div", { class: "cards" }, cards);
  const over = gates.length > FEW ? overview(run, () => stats) : null;
  const intro = run.sample.dial
    ? `Gates of ${grouped(gates[0].T)} real tokens, computed in this page for the dial above, or for another α or rule ` +
      "that you set here. The inputs of each layer are those at the saved setting. The figures are exact when one layer is " +
      "turned alone. When all layers are turned, they are approximate, because each layer changes the inputs of the next."
    : `Router ${run.model.router} selects experts by its own rule. It has no dial: its gates are shown as saved.`;
  let single = null;
  return {
    nodes: [el("p", {}, intro), controls, total, over, holder].filter(has),
    update() {
      const settings = gates.map((_, i) => settingOf(run, state, i));
      const { selection } = settings[state.layer];
      stats = gates.map((g, i) => gateStats(g, settings[i].alpha, settings[i].selection));
      controls.update();
      const means = (key) => mean(stats.map((s) => s[key]));
      const own = selection.kind === "own"; // then the gates do not tell which experts compute a token
      total.replaceChildren(
        ...(own ? ["Entropy "] : [
          el("b", {}, `${fixed(means("experts"), 3)} experts per token`),
          ` (${saySelection(selection)}), entropy `,
        ]),
        el("b", {}, `${fixed(means("entropy"), 3)} nats`),
        gates.length > 1 ? `, means over ${gates.length} layers. ` : ". ",
        stats.some((s) => bandTells(s, gateSize(run))) ? BAND : "",
      );
      if (over) {
        over.update();
        if (single !== state.layer) {
          single = state.layer;
          cards.splice(0, 1, layerCard(run, single, state, () => stats[cards[0].layer]));
          holder.replaceChildren(cards[0]);
        }
      }
      cards.forEach((card) => card.update());
    },
  };
}

function layerCard(run, layer, state, stats) {
  const N = gateSize(run), gates = gatesOf(run)[layer], name = `Block ${run.model.moe_layers[layer]}`;
  const own = settingOf(run, state, layer).selection.kind === "own";
  const facts = el("dl", { class: "stats" });
  const entropy = figure(
    "Entropy over α (band: certified, where it says something)",
    (width) => entropyPlot(width, gates, stats(), N),
  );
  const load = figure(
    "Load: % of tokens received (line: mean gate; dotted: equal)",
    (width) => loadPlot(width, stats(), N),
  );
  const sorted = figure(
    "Mean gate by rank (line: cumulative; dotted: τ)",
    (width) => sortedPlot(width, stats(), settingOf(run, state, layer).selection),
  );
  const card = el(
    "article",
    { class: "card", "data-layer": layer },
    el("h3", {}, name),
    facts,
    entropy,
    load,
    sorted,
  );
  card.layer = layer;
  card.update = () => {
    const s = stats();
    const shown = [
      ["α", digits(s.alpha), "alpha"],
      ["entropy H, nats", fixed(s.entropy, 3), "entropy"],
      bandTells(s, N) ? ["certified", `${fixed(s.lower, 3)} – ${fixed(s.upper, 3)}`, "band"] : null,
      ["exp(H)", fixed(Math.exp(s.entropy), 2), "effective"],
      ["experts per token", fixed(s.experts, 3), "experts"],
      ["mass dropped", percent(s.dropped), "dropped"],
      ["load", `${fixed(100 * Math.min(...s.load), 1)} – ${fixed(100 * Math.max(...s.load), 1)} %`, "load"],
      ["load CV", fixed(s.cv, 3), "cv"],
    ].filter(has);
    if (!run.sample.dial) shown.shift();
    if (own) shown.splice(-4);
    facts.replaceChildren(
      ...shown.map(([term, value, key]) =>
        el("div", {}, el("dt", {}, term), el("dd", { "data-stat": key }, value))
      ),
    );
    [entropy, load, sorted].forEach((f) => f.redraw());
  };
  if (run.sample.dial && !gates.curve) {
    setTimeout(() => {
      gates.curve = CURVE.map((alpha) => gateStats(gates, alpha, { kind: "dense" }));
      entropy.redraw();
    });
  }
  entropy.hidden = !run.sample.dial;
  load.hidden = own;
  return card;
}

function entropyPlot(width, gates, s, N) {
  const x = { domain: [0.1, 10], log: true, label: "α", ticks: [0.1, 0.2, 0.5, 1, 2, 5, 10] };
  const y = { domain: [0, Math.log(N) * 1.08], label: "nats" };
  return axes(width, {
    x,
    y,
    height: 190,
    label: "Entropy over α",
    paint(pane) {
      const curve = gates.curve || [], color = "var(--c0)";
      const here = Math.max(0.1, Math.min(10, s.alpha));
      rule(pane, Math.log(N), `uniform: log ${N}`);
      const told = curve.filter((c) => bandTells(c, N));
      if (told.length) band(pane, told.map((c) => [c.alpha, c.lower, c.upper]), color);
      line(pane, curve.map((c) => [c.alpha, c.entropy]), color);
      pane.g.append(
        svg("line", { class: "hair", x1: pane.X(here), x2: pane.X(here), y1: pane.top, y2: pane.bottom }),
        markAt("circle", pane.X(here), pane.Y(s.entropy), color, 4.5),
      );
      crosshair(pane, curve.map((c) => c.alpha), (alpha) => {
        const c = curve.find((v) => v.alpha === alpha);
        return [
          tipTitle(`α ${digits(alpha)}`),
          tipRow("entropy", fixed(c.entropy, 3)),
          bandTells(c, N) ? tipRow("certified", `${fixed(c.lower, 3)} – ${fixed(c.upper, 3)}`) : null,
        ].filter(has);
      });
    },
  });
}

function loadPlot(width, s, N) {
  const top = Math.max(...s.load, ...s.gate, 1.5 * s.fair) * 1.08;
  const bars = s.load.map((value, e) => ({
    name: String(e),
    value,
    tick: s.gate[e],
    color: expertColor(e, N),
    content: () => [
      tipTitle(`expert ${e}`),
      tipRow("load: tokens received", percent(value)),
      tipRow("tokens led", percent(s.lead[e])),
      tipRow("mean gate", percent(s.gate[e])),
    ],
  }));
  return barChart(width, {
    bars,
    top,
    rule: s.fair,
    xLabel: "expert",
    label: "Load of each expert",
    height: 160,
  });
}

function sortedPlot(width, s, { kind, tau }) {
  let sum = 0;
  const summed = s.sorted.map((v) => (sum += v));
  const bars = s.sorted.map((value, i) => ({
    name: String(i + 1),
    value,
    color: "var(--c0)",
    content: () => [
      tipTitle(`rank ${i + 1}`),
      tipRow("mean gate", percent(value)),
      tipRow("ranks up to here", percent(summed[i])),
    ],
  }));
  return barChart(width, {
    bars,
    top: 1,
    line: summed,
    rule: kind === "mass" ? tau : null,
    xLabel: "rank of the expert",
    label: "Mean gate by rank",
    height: 160,
  });
}

// Two pictures of all layers, for a deep model.
function overview(run, stats) {
  const N = gateSize(run), names = run.model.moe_layers;
  const x = { domain: [-0.5, names.length - 0.5], label: "block", format: (i) => names[i] };
  const ticks = (width) =>
    names.map((_, i) => i).filter((i) =>
      i % Math.ceil(names.length / Math.max(1, Math.floor(width / 34))) === 0
    );
  const draw = (label, y, values, low, high, say) => (width) =>
    axes(width, {
      x: { ...x, ticks: ticks(width) },
      y,
      height: 210,
      label,
      paint(pane) {
        stats().forEach((s, i) => {
          if (low && bandTells(s, N)) {
            pane.g.append(
              svg("line", {
                class: "bandmark",
                x1: pane.X(i),
                x2: pane.X(i),
                y1: pane.Y(s[low]),
                y2: pane.Y(s[high]),
                stroke: seriesColor(0),
              }),
            );
          }
          mark(
            pane,
            "circle",
            i,
            s[values],
            seriesColor(0),
            () => [tipTitle(`block ${names[i]}`), ...say(s)],
            4,
          );
        });
      },
    });
  const entropy = figure(
    "Entropy of every layer (bar: certified, where it says something)",
    draw(
      "Entropy of every layer",
      { domain: [0, Math.log(N) * 1.05], label: "nats" },
      "entropy",
      "lower",
      "upper",
      (s) => [
        tipRow("entropy", fixed(s.entropy, 3)),
        ...(bandTells(s, N) ? [tipRow("certified", `${fixed(s.lower, 3)} – ${fixed(s.upper, 3)}`)] : []),
      ],
    ),
  );
  const experts = figure(
    "Experts per token",
    (width) =>
      draw(
        "Experts per token",
        { domain: [0, Math.max(...stats().map((s) => s.experts)) * 1.1], label: "experts" },
        "experts",
        null,
        null,
        (s) => [tipRow("experts per token", fixed(s.experts, 3)), tipRow("mass dropped", percent(s.dropped))],
      )(width),
  );
  experts.hidden = run.model.selection.kind === "own";
  const node = el("div", { class: "grid2" }, entropy, experts);
  node.update = () => [entropy, experts].forEach((f) => f.redraw());
  return node;
}
