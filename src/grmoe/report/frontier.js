// What `grmoe dial` measured: perplexity against experts per token and against speed, and the certificates.

// How the rules are drawn. Rules that are not listed get what is left.
const RULES = {
  "one α for all": { mark: "circle", r: 2.8, line: true },
  "one α per layer allowed": { mark: "square", dash: "6 3", r: 4.6, line: true, hollow: true },
  "top-k": { mark: "triangle", r: 4.4 },
  "k per layer": { mark: "diamond", dash: "2 3", r: 4.2, line: true },
  "gate × norm": { mark: "triangle", dash: "8 3 2 3", r: 4.2, line: true, hollow: true },
};

// Every rule that was measured, as series of a picture.
function seriesOf(dial) {
  const names = Object.keys(RULES);
  const families = [...dial.families].sort((a, b) => names.indexOf(a.name) - names.indexOf(b.name));
  return families.map(({ name, points }, i) => ({
    name,
    color: seriesColor(name in RULES ? names.indexOf(name) : i),
    ...(RULES[name] || { mark: MARKS[i % 4], dash: DASHES[i % 4], r: 4, line: true }),
    points: points.map((j) => dial.points[j]),
  }));
}

// The best frontier of a run, for a picture of several.
const frontierOf = (dial) => seriesOf(dial).find((s) => s.name === "one α per layer allowed").points;

function pointTip(point, name) {
  return [
    tipTitle(`${name}: ${point.name}`),
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

const ABOVE_LABEL = 170; // pixels of a label

// Settings far above the scale of a picture: arrows on its upper edge. Those that are close share a label.
function markAbove(pane, points) {
  const groups = [];
  for (const p of [...points].sort((a, b) => a.x - b.x)) {
    const place = pane.X(p.x), last = groups.at(-1);
    const arrow = svg(
      "g",
      { class: "point above" },
      svg("circle", { cx: place, cy: pane.top, r: 9, fill: "transparent" }),
      markAt("arrow", place, pane.top, p.color, 4.4),
    );
    pane.g.append(explain(arrow, p.content));
    if (last && place < last.right + ABOVE_LABEL) last.right = place, last.values.push(p.perplexity);
    else groups.push({ left: place, right: place, values: [p.perplexity] });
  }
  for (const { left, right, values } of groups) {
    const words = `${values.map((v) => fixed(v, 1)).join(", ")}: above the scale`;
    const fits = right + 10 + 2 * HALF_LETTER * words.length <= pane.right;
    pane.g.append(
      svg("text", { class: "tick above", x: fits ? right + 8 : left - 8, y: pane.top - 6, "text-anchor": fits ? "start" : "end" }, words),
    );
  }
}

// series: [{name, color, mark, dash, points, line}]. named: points with a mark of their own, {chosen, trained}.
// scale: the perplexities to show. The figure's `point(p)` moves the mark of the slider.
function pareto(caption, series, named, scale, speed, height = 300) {
  const of = (point) => (speed ? point.speed && point.speed.tokens_per_second : point.experts_per_token);
  const marked = Object.entries(named).filter(([, p]) => p);
  let here = null, move = () => {};
  const draw = (width) => {
    const [low, high] = padded(scale, 0.08);
    const placed = (p) => has(of(p)), visible = (p) => placed(p) && p.perplexity <= high;
    const all = [...series.flatMap((s) => s.points), ...marked.map(([, p]) => p)].filter(placed);
    const xs = all.map(of), above = new Set(all.filter((p) => !visible(p)).map((p) => p.perplexity));
    const x = {
      domain: padded(xs),
      label: speed ? "tokens/s, measured prefill" : "experts per token",
      format: speed ? short : undefined,
    };
    return axes(width, {
      x,
      y: { domain: [low, high], label: "perplexity" },
      height,
      label: `${caption}. ${series.map((s) => `${s.name}: ${s.points.length} settings`).join(", ")}.` +
        (above.size ? ` Above the picture: ${[...above].map((v) => fixed(v, 1)).join(", ")}.` : ""),
      paint(pane) {
        // Points of several series coincide. The first is drawn on top, the others are visible around it.
        for (
          const { name, color, mark: kind, dash, points, line: joined, r, hollow } of [...series].reverse()
        ) {
          if (joined && !speed) {
            const steps = points.map((p) => [of(p), Math.min(p.perplexity, high)]);
            stairs(pane, steps, color, { "stroke-dasharray": dash });
          }
          for (const p of points.filter(visible)) {
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
        const outside = new Map(); // the same setting may be part of several series
        for (const { name, color, points } of series) {
          for (const p of points.filter((p) => placed(p) && !visible(p))) {
            if (!outside.has(p)) {
              outside.set(p, { x: of(p), color, perplexity: p.perplexity, content: () => pointTip(p, name) });
            }
          }
        }
        markAbove(pane, outside.values());
        for (const [kind, p] of marked) if (visible(p)) ring(pane, of(p), p.perplexity, kind);
        const needle = svg("g", { class: "needle" }, svg("line", { y1: pane.top, y2: pane.bottom }), svg("circle", { r: 5 }));
        pane.g.append(needle);
        move = () => {
          const shown = here && has(of(here));
          needle.setAttribute("visibility", shown ? "visible" : "hidden");
          if (!shown) return;
          const middle = Math.max(pane.left, Math.min(pane.right, pane.X(of(here))));
          fill(needle.firstChild, { x1: middle, x2: middle }, []);
          const inside = here.perplexity <= high && here.perplexity >= low;
          fill(needle.lastChild, { cx: middle, cy: inside ? pane.Y(here.perplexity) : pane.top }, []);
        };
        move();
      },
    });
  };
  const node = figure(caption, draw);
  node.point = (p) => {
    here = p;
    move();
  };
  return node;
}

const legendOf = (series) =>
  legend([
    ...series.map((s) => ({ ...s, dash: s.line ? s.dash : "0 30" })),
    { name: "as chosen", ring: "chosen" },
    { name: "as trained", ring: "trained" },
  ]);

// The picture at the top: perplexity against experts per token, all rules, with the slider's place.
function drawRules(section, runs, state) {
  let shown = null, picture = null;
  listen(() => {
    const run = runs[state.run];
    if (shown !== run) {
      shown = run;
      section.hidden = !run.dial;
      if (!run.dial) return;
      const { chosen, trained } = run.dial, series = seriesOf(run.dial);
      picture = pareto("All settings on a frontier, lower is better", series, { chosen, trained }, run.dial.scale, false, 340);
      section.querySelector(".body").replaceChildren(picture, legendOf(series));
    }
    if (run.dial) picture.point(run.slider && measuredAt(run.slider, state)); // no slider: its model cannot be opened
  });
}

function drawFrontier(host, runs, state) {
  const measured = runs.map((run, i) => ({ run, i })).filter(({ run }) => run.dial);
  if (runs.length > 1) for (const run of runs) host.append(...notesOf(run, ["frontier"], true));
  if (!measured.length && runs.length === 1) hideSection("frontier"); // the dial at the top says why
  if (measured.length > 1) host.append(...together(measured));
  const detail = el("div");
  host.append(detail);
  let shown = null;
  listen(() => {
    if (shown === state.run) return;
    shown = state.run;
    detail.replaceChildren(...frontierDetail(runs[state.run], runs.length > 1));
  });
}

// The frontiers of several runs in one picture, if they were measured on the same tokens.
function together(measured) {
  const texts = new Set(measured.map(({ run }) => JSON.stringify(run.dial.calibration)));
  if (!sameData(measured.map(({ run }) => run)) || texts.size > 1) {
    return [
      el("p", {}, "The dials were measured on different data. Their perplexities cannot be compared, so each is shown alone."),
    ];
  }
  const series = measured.map(({ run, i }) => ({
    name: run.name,
    color: seriesColor(i),
    mark: MARKS[i % 4],
    dash: DASHES[i % 4],
    points: frontierOf(run.dial),
    line: true,
  }));
  const scale = measured.flatMap(({ run }) => run.dial.scale);
  const named = Object.fromEntries(measured.map(({ run, i }) => [`chosen ${i}`, run.dial.chosen]));
  return [
    el("h3", {}, "All models, one α per layer allowed"),
    legend([...series, { name: "as chosen", ring: "chosen" }]),
    el(
      "div",
      { class: "grid2" },
      pareto("All models against experts per token", series, named, scale, false),
      timed(series.flatMap((s) => s.points))
        ? pareto("All models against measured speed", series, named, scale, true)
        : null,
    ),
  ];
}

// Whether one of these settings was timed. `grmoe dial --no-speed` times none.
const timed = (points) => points.some((p) => p.speed);

function frontierDetail(run, named) {
  if (!run.dial) return [];
  const { dial } = run, { chosen, trained } = dial, series = seriesOf(dial);
  return [
    named ? el("h3", {}, run.name) : null,
    el(
      "p",
      {},
      `Asked for: ${dial.asked}. `,
      `Measured on ${grouped(dial.calibration.tokens)} tokens (${dial.device}, ${dial.dtype}). `,
      `Chosen: ${chosen.name}. It computes `,
      el("b", {}, `${fixed(chosen.experts_per_token, 2)} experts per token`),
      ` instead of ${fixed(trained.experts_per_token, 2)}. Perplexity is ${fixed(chosen.perplexity, 2)} instead of `,
      `${fixed(trained.perplexity, 2)}: `,
      el("b", {}, signed(chosen.increase.value)),
      ` (90 % interval ${signed(chosen.increase.low)} to ${signed(chosen.increase.high)}).`,
    ),
    legendOf(series),
    el(
      "div",
      { class: "grid2" },
      timed([chosen])
        ? pareto("Perplexity against measured speed (bars: middle 80 %)", series, { chosen, trained }, dial.scale, true)
        : null,
      alphaTable(dial),
    ),
    certificates(dial),
    checksOf(dial),
    fold("All settings in the pictures, as a table", rulesTable(series)),
  ].filter(has);
}

function rulesTable(series) {
  const speed = timed(series.flatMap((s) => s.points));
  const rows = series.flatMap(({ name, points }) =>
    points.map((p) => [
      name,
      fixed(p.experts_per_token, 3),
      fixed(p.perplexity, 3),
      signed(p.increase.value),
      ...(speed ? [p.speed ? fixed(p.speed.relative, 2) : "–"] : []),
      p.name,
    ])
  );
  const headings = ["rule", "experts per token", "perplexity", "increase", ...(speed ? ["speed"] : []), "setting"];
  return table(headings, rows, {
    label: "All settings in the pictures",
    class: "worded",
  });
}

function alphaTable(dial) {
  const speed = timed([dial.chosen]);
  const row = (name, p) => [
    name,
    fixed(p.effective_experts_entropy, 2),
    fixed(p.experts_per_token, 3),
    fixed(p.perplexity, 2),
    ...(speed ? [p.speed ? fixed(p.speed.relative, 2) : "–"] : []),
  ];
  const rows = [row("as trained", dial.trained), ...dial.table.map((p) => row(digits(p.alpha), p)), {
    cells: row("as chosen", dial.chosen),
    class: "strong",
  }];
  const { selection: kind, selection_tau: tau, num_experts_per_tok: k } = dial.table[0].setting;
  return el(
    "figure",
    {},
    el("figcaption", {}, `What α does (${saySelection({ kind, tau, k })}${speed ? "; speed relative to trained" : ""})`),
    table(["α", "exp(H)", "experts per token", "perplexity", ...(speed ? ["speed"] : [])], rows, { label: "What α does" }),
  );
}

// Certificates that exclude something are shown. If there are none, the table is folded and its title says why.
function certificates(dial) {
  const telling = dial.certificates.filter((c) => c.tells), all = dial.certificates;
  const size = (c) => percent(c.exact / c.output, 0);
  const meaning = "A certificate bounds how far the output of a block can be from the output with all experts at the same α. It holds for " +
    "each of the " + `${grouped(all[0].tokens)} tokens. It says something where the bound is below the size of the output.`;
  if (telling.length) {
    return el(
      "figure",
      {},
      el("figcaption", {}, `Certificates of the chosen setting (${telling.length} of ${all.length} blocks)`),
      el("p", {}, meaning),
      certificateTable(telling),
    );
  }
  return fold(
    `Certificates: they exclude nothing here. Measured: ${all.map(size).join(", ")} of the output is missing`,
    el("p", {}, meaning),
    certificateTable(all),
  );
}

function certificateTable(rows) {
  return table(
    ["block", "measured error", "proved bound", "size of the output", "mass left out", "at most"],
    rows.map((c) => [
      `block ${c.layer}`,
      digits(c.exact),
      c.holds ? digits(c.bound) : "∞ for some",
      digits(c.output),
      fixed(c.dropped_mean, 3),
      fixed(c.dropped_max, 3),
    ]),
    { label: "Certificates" },
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
