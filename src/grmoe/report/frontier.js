// What `grmoe dial` measured: perplexity against experts per token and against speed, and the certificates.

const frontierOf = (dial) => dial.points.filter((p) => p.on_frontier);
const uniformOf = (dial) => dial.points.filter((p) => p.on_uniform_frontier);

const topKOf = (dial) =>
  dial.points.filter((p) => ["top-k", "trained"].includes(p.family) && p.setting.selection === "topk");

function saySetting({ alpha, selection, selection_tau: tau, num_experts_per_tok: k }) {
  return `α ${sayAlphas([alpha].flat())}, ${saySelection({ kind: selection, tau, k })}`;
}

function pointTip(point, name) {
  return [
    tipTitle(`${name}: ${saySetting(point.setting)}`),
    tipRow("experts per token", fixed(point.experts_per_token, 3)),
    tipRow("perplexity", fixed(point.perplexity, 2)),
    tipRow("increase", signed(point.increase.value)),
    tipRow("90 % interval", `${signed(point.increase.low)} to ${signed(point.increase.high)}`),
    point.speed
      ? tipRow(
        "tokens/s",
        `${grouped(point.speed.tokens_per_second)} (${grouped(point.speed.interval[0])} to ${
          grouped(point.speed.interval[1])
        })`,
      )
      : null,
    point.speed ? tipRow("times the trained speed", fixed(point.speed.relative, 2)) : null,
  ].filter(has);
}

// All of the frontiers, and points not far above. A top-1 that is much worse would flatten the picture: it is left out.
function perplexityRange(series, chosen) {
  const frontiers = series.filter((s) => s.line).flatMap((s) => s.points);
  const reached = [...frontiers, ...chosen].map((p) => p.perplexity);
  const low = Math.min(...reached), high = Math.max(...reached);
  const others = series.flatMap((s) => s.points.map((p) => p.perplexity));
  return padded([...reached, ...others.filter((v) => v <= low + 1.5 * (high - low))], 0.08);
}

// series: [{name, color, mark, dash, points, line}]. chosen: points with a ring.
function pareto(series, chosen, speed) {
  const of = (point) => (speed ? point.speed && point.speed.tokens_per_second : point.experts_per_token);
  const draw = (width) => {
    const [low, high] = perplexityRange(series, chosen);
    const visible = (p) => has(of(p)) && p.perplexity <= high;
    const xs = [...series.flatMap((s) => s.points), ...chosen].filter(visible).map(of);
    if (!xs.length) return el("p", { class: "note" }, "Nothing was timed.");
    const x = {
      domain: padded(xs),
      label: speed ? "tokens/s, measured prefill" : "experts per token",
      format: speed ? short : undefined,
    };
    return axes(width, {
      x,
      y: { domain: [low, high], label: "perplexity" },
      height: 300,
      label: "Perplexity against cost",
      paint(pane) {
        // Points of several series coincide. The first is drawn on top, the others are visible around it.
        for (
          const { name, color, mark: kind, dash, points, line: joined, r, hollow } of [...series].reverse()
        ) {
          const shown = points.filter(visible);
          if (joined && !speed) {
            stairs(pane, shown.map((p) => [of(p), p.perplexity]), color, { "stroke-dasharray": dash });
          }
          for (const p of shown) {
            if (speed) {
              line(
                pane,
                p.speed.interval.map((v) => [Math.min(Math.max(v, x.domain[0]), x.domain[1]), p.perplexity]),
                color,
                { class: "whisker" },
              );
            }
            mark(pane, kind, of(p), p.perplexity, color, () => pointTip(p, name), r, hollow);
          }
        }
        for (const p of chosen.filter(visible)) ring(pane, of(p), p.perplexity);
      },
    });
  };
  return figure(
    speed
      ? "Against measured speed (bars: middle 80 %)"
      : "Against experts per token (line: lower envelope)",
    draw,
  );
}

function drawFrontier(host, runs, state) {
  const measured = runs.map((run, i) => ({ run, i })).filter(({ run }) => run.dial);
  for (const run of runs) host.append(...notesOf(run, ["frontier"], runs.length > 1));
  if (!measured.length) return;
  if (measured.length > 1) {
    const series = measured.map(({ run, i }) => ({
      name: run.name,
      color: seriesColor(i),
      mark: MARKS[i % 4],
      dash: DASHES[i % 4],
      points: frontierOf(run.dial),
      line: true,
    }));
    const chosen = measured.map(({ run }) => run.dial.chosen);
    host.append(
      el("h3", {}, "All runs, one α per layer allowed"),
      legend([...series, { name: "chosen", ring: true }]),
      el("div", { class: "grid2" }, pareto(series, chosen, false), pareto(series, chosen, true)),
    );
  }
  const detail = el("div");
  host.append(detail);
  let shown = null;
  listen(() => {
    if (shown === state.run) return;
    shown = state.run;
    detail.replaceChildren(...frontierDetail(runs[state.run], runs.length > 1));
  });
}

function frontierDetail(run, named) {
  if (!run.dial) {
    return named
      ? [el("h3", {}, run.name), el("p", { class: "note" }, "The frontier of this run is not measured.")]
      : [];
  }
  const { dial } = run, { chosen, trained } = dial;
  const series = [
    {
      name: "one α for all",
      color: seriesColor(0),
      mark: "circle",
      points: uniformOf(dial),
      line: true,
      r: 2.8,
    },
    {
      name: "one α per layer allowed",
      color: seriesColor(1),
      mark: "square",
      dash: "6 3",
      points: frontierOf(dial),
      line: true,
      r: 4.6,
      hollow: true,
    },
    { name: "top-k", color: seriesColor(2), mark: "triangle", r: 4.4, points: topKOf(dial) },
  ];
  return [
    named ? el("h3", {}, run.name) : null,
    el(
      "p",
      {},
      `Target: ${sayTarget(dial.target)}. `,
      `Measured on ${grouped(dial.calibration.tokens)} tokens (${dial.device}, ${dial.dtype}). `,
      `Chosen: ${saySetting(chosen.setting)}. It computes `,
      el("b", {}, `${fixed(chosen.experts_per_token, 2)} experts per token`),
      ` instead of ${fixed(trained.experts_per_token, 2)}. Perplexity is ${fixed(chosen.perplexity, 2)} instead of `,
      `${fixed(trained.perplexity, 2)}: `,
      el("b", {}, signed(chosen.increase.value)),
      ` (90 % interval ${signed(chosen.increase.low)} to ${signed(chosen.increase.high)})`,
      chosen.speed ? `. Speed is ${fixed(chosen.speed.relative, 2)} times that of the trained setting.` : ".",
    ),
    legend([...series.map((s) => ({ ...s, dash: s.line ? s.dash : "0 30" })), {
      name: "chosen",
      ring: true,
    }]),
    el("div", { class: "grid2" }, pareto(series, [chosen], false), pareto(series, [chosen], true)),
    el("div", { class: "two" }, alphaTable(dial), certificateTable(dial)),
    checksOf(dial),
  ].filter(has);
}

function sayTarget({ kind, value }) {
  if (kind === "perplexity") return `perplexity at most ${digits(100 * value)} % above the trained setting's`;
  if (kind === "experts") return `at most ${digits(value)} experts per token`;
  return `at least ${digits(value)} times the trained speed`;
}

function alphaTable(dial) {
  const row = (name, p) => [
    name,
    fixed(p.effective_experts_entropy, 2),
    fixed(p.experts_per_token, 3),
    fixed(p.perplexity, 2),
    p.speed ? fixed(p.speed.relative, 2) : "–",
  ];
  const rows = [row("trained", dial.trained), ...dial.table.map((p) => row(digits(p.alpha), p)), {
    cells: row("chosen", dial.chosen),
    class: "strong",
  }];
  const { selection: kind, selection_tau: tau, num_experts_per_tok: k } = dial.table[0].setting;
  return el(
    "figure",
    {},
    el("figcaption", {}, `What α does (${saySelection({ kind, tau, k })}; speed relative to trained)`),
    table(["α", "exp(H)", "experts per token", "perplexity", "speed"], rows, { label: "What α does" }),
  );
}

function certificateTable(dial) {
  const rows = dial.certificates.map((c) => [
    String(c.layer),
    fixed(c.dropped_mean, 3),
    fixed(c.dropped_max, 3),
    fixed(c.entropy, 2),
    `${fixed(c.entropy_lower, 2)} to ${fixed(c.entropy_upper, 2)}`,
    digits(c.output),
    digits(c.exact),
    c.holds ? digits(c.bound) : "∞ for some",
  ]);
  return el(
    "figure",
    {},
    el(
      "figcaption",
      {},
      `Certificates of the chosen setting: ${grouped(dial.certificates[0].tokens)} tokens, ` +
        "compared with all experts at the same α",
    ),
    table(["layer", "mass dropped", "at most", "entropy", "certified", "‖ŷ‖", "error", "bound"], rows, {
      label: "Certificates",
    }),
  );
}

function checksOf(dial) {
  if (!dial.checks.length) return null;
  const rows = dial.checks.map((c) => [
    c.text,
    grouped(c.tokens),
    fixed(c.experts_per_token, 3),
    `${fixed(c.perplexity_trained, 2)} → ${fixed(c.perplexity, 2)}`,
    signed(c.increase.value),
    has(c.missed_by)
      ? (c.missed_by <= 0
        ? "kept"
        : `missed by ${
          dial.target.kind === "perplexity" ? `${fixed(100 * c.missed_by, 2)} points` : fixed(c.missed_by, 3)
        }`)
      : "–",
  ]);
  return el(
    "figure",
    {},
    el("figcaption", {}, "The target on other text"),
    table(["text", "tokens", "experts per token", "perplexity", "increase", "target"], rows, { label: "Checks" }),
  );
}
