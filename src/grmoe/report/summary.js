// What the models are, side by side, and how they were trained.

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// Whether losses per token can be compared: the same prepared data, so the same tokenizer and held-out text.
const sameData = (runs) =>
  runs.length === 1 ||
  runs.every((run) => run.training && run.training.data && run.training.data === runs[0].training.data);

// Routing figures on held-out text: from the last validation, or from the analysis.
function routingOf(run) {
  if (run.training && run.training.validation) return run.training.validation;
  if (run.analysis) return { entropy: mean(run.analysis.layers.map((l) => l.entropy)) };
  return {};
}

const PER_TOKEN = ["perplexity, held-out", "perplexity of a unigram model"];
const PER_BYTE = "bits per byte, held-out";

// [heading, value for a run, whether a tile shows it too]
const FACTS = [
  ["preset", (r) => r.training && r.training.preset],
  ["router", (r) => r.model && r.model.router + (r.model.rank ? `, rank ${r.model.rank}` : "")],
  [
    "blocks",
    (r) => r.model && `${r.model.blocks} × ${r.model.width}, ${r.model.moe_layers.length} with experts`,
  ],
  ["experts", (r) =>
    r.model && `${r.model.experts} of width ${r.model.expert_width}` +
      (r.model.shared_experts ? `, ${r.model.shared_experts} shared` : "")],
  ["selection", (r) => r.model && `${saySelection(r.model.selection)}, α ${sayAlphas(r.model.alphas)}`],
  ["budgets", (r) =>
    r.model && r.model.curve &&
    `${digits(r.model.curve[0].experts_per_token)} to ${
      digits(r.model.curve[r.model.curve.length - 1].experts_per_token)
    } experts per token, ${has(r.model.budget) ? `now ${digits(r.model.budget)}` : "now as trained"}`],
  ["parameters", (r) => r.model && `${short(r.model.total)}, ${short(r.model.active)} active`, true],
  [
    "trained",
    (r) =>
      r.training &&
      (r.model && has(r.model.step) && r.model.step !== r.training.steps
        ? `step ${grouped(r.model.step)} of ${grouped(r.training.steps)}`
        : `${grouped(r.training.logged || r.training.steps)} steps`),
  ],
  [
    "tokens",
    (r) => r.training && has(r.training.tokens) && `${short(r.training.tokens)} of ${r.training.text}`,
  ],
  ["training speed", (r) =>
    r.training && has(r.training.tokens_per_second) &&
    `${short(r.training.tokens_per_second)} tokens/s, ${r.training.device || "unknown device"}`],
  [PER_BYTE, (r) => r.training && has(r.training.bits_per_byte) && fixed(r.training.bits_per_byte, 3)],
  [PER_TOKEN[0], (r) => perplexityOf(r) && fixed(perplexityOf(r), 2), true],
  [PER_TOKEN[1], (r) => r.training && has(r.training.unigram) && fixed(r.training.unigram, 1), true],
  [
    "experts per token",
    (r) => has(routingOf(r).experts_per_token) && fixed(routingOf(r).experts_per_token, 2),
    true,
  ],
  [
    "entropy of the gate, nats",
    (r) =>
      has(routingOf(r).entropy) &&
      `${fixed(routingOf(r).entropy, 3)}${
        r.model ? ` (uniform ${fixed(Math.log(gateSize(r)), 3)})` : ""
      }`,
    true,
  ],
  ["load CV (std / mean)", (r) => has(routingOf(r).load_cv) && fixed(routingOf(r).load_cv, 3), true],
  ["smallest load, share of tokens", (r) => has(routingOf(r).min_load) && percent(routingOf(r).min_load)],
  [
    "largest overlap of two experts",
    (r) => has(routingOf(r).max_overlap) && fixed(routingOf(r).max_overlap, 3),
    true,
  ],
];

function perplexityOf(run) {
  if (run.training && run.training.validation) return run.training.validation.perplexity;
  return run.dial ? run.dial.trained.perplexity : null;
}

function drawSummary(host, runs) {
  if (runs.length === 1) host.append(tiles(runs[0]));
  const same = sameData(runs);
  const wanted = FACTS
    .filter(([, , tile]) => runs.length > 1 || !tile)
    .filter(([name]) => same || !PER_TOKEN.includes(name));
  if (!same) {
    host.append(
      el("p", {}, "These models were trained on different data. Their perplexities per token cannot be compared. Bits per byte can."),
    );
  }
  const rows = wanted
    .map(([name, value]) => [name, ...runs.map((run) => value(run) || "–")])
    .filter(([, ...cells]) => cells.some((c) => c !== "–"));
  const headings = runs.map((run, i) => (runs.length > 1 ? runName(run, i) : run.name));
  const facts = table(["fact", ...headings], rows, { label: "Summary of the models" });
  facts.classList.add("facts");
  const domains = same ? domainChart(runs) : null;
  host.append(el("div", { class: domains ? "two" : "" }, facts, domains));
  for (const run of runs) host.append(...notesOf(run, ["model"], true));
}

const runName = (run, i) =>
  el("span", { class: "run" }, el("i", { class: "swatch", style: { background: seriesColor(i) } }), run.name);

function tiles(run) {
  const routing = routingOf(run);
  const shown = [
    [
      "perplexity",
      fixed(perplexityOf(run), 2),
      run.training && has(run.training.unigram)
        ? `unigram ${fixed(run.training.unigram, 0)}`
        : "held-out text",
    ],
    [
      "parameters",
      run.model ? short(run.model.total) : "–",
      run.model ? `${short(run.model.active)} active` : "",
    ],
    [
      "experts per token",
      fixed(routing.experts_per_token, 2),
      run.model ? `of ${run.model.experts}, ${saySelection(run.model.selection)}` : "",
    ],
    [
      "entropy",
      fixed(routing.entropy, 2),
      run.model ? `nats, uniform ${fixed(Math.log(gateSize(run)), 2)}` : "nats",
    ],
    ["load CV", fixed(routing.load_cv, 3), "std / mean of tokens received"],
    ["largest overlap", fixed(routing.max_overlap, 3), "of two experts' subspaces"],
  ].filter(([, value]) => value !== "–");
  return el(
    "div",
    { class: "tiles" },
    shown.map(([name, value, more]) =>
      el(
        "div",
        { class: "tile" },
        el("div", { class: "name" }, name),
        el("div", { class: "value" }, value),
        el("div", { class: "more" }, more),
      )
    ),
  );
}

// Perplexity by domain: one row per domain, one mark per run.
function domainChart(runs) {
  const losses = runs.map((run) =>
    (run.training && run.training.validation && run.training.validation.domains) || {}
  );
  const names = [...new Set(losses.flatMap(Object.keys))];
  if (names.length < 2) return null;
  const first = (name) => losses.map((l) => l[name]).find(has);
  names.sort((a, b) => first(a) - first(b));
  const clip = (name) => clipped(name, 16);
  const draw = (width) => {
    const all = losses.flatMap((l) => Object.values(l)).filter(has).map(Math.exp);
    const left = 12 + 6.6 * Math.max(...names.map((n) => clip(n).length));
    const x = {
      domain: [Math.min(...all) / 1.15, Math.max(...all) * 1.15],
      log: true,
      label: "perplexity",
      format: (v) => digits(v, 4),
    };
    const y = {
      domain: [names.length - 0.5, -0.5],
      ticks: names.map((_, i) => i),
      format: (i) => clip(names[i]),
    };
    const height = names.length * 24 + 50;
    return axes(width, {
      x,
      y,
      height,
      margin: { left, top: 8 },
      label: "Perplexity by domain",
      paint(pane) {
        names.forEach((name, i) =>
          losses.forEach((own, run) => {
            if (!has(own[name])) return;
            const content = () => [
              tipTitle(name),
              ...losses.map((l, j) =>
                tipRow(runs[j].name, fixed(has(l[name]) ? Math.exp(l[name]) : null, 2), seriesColor(j))
              ),
            ];
            mark(pane, MARKS[run % 4], Math.exp(own[name]), i, seriesColor(run), content, 4.4);
          })
        );
      },
    });
  };
  const rows = names.map((name) => [name, ...losses.map((l) => fixed(has(l[name]) ? Math.exp(l[name]) : null, 2))]);
  return el(
    "div",
    {},
    figure("Perplexity by domain, last validation", draw),
    fold(
      "Perplexity by domain as a table",
      table(["domain", ...runs.map((run) => run.name)], rows, { label: "Perplexity by domain" }),
    ),
  );
}

// -- curves -----------------------------------------------------------------------------------------

function drawTraining(host, runs) {
  const logged = runs.map((run, i) => ({ run, i, c: run.curves })).filter(({ c }) => c);
  for (const run of runs) host.append(...notesOf(run, ["curves"], true));
  if (!logged.length) {
    if (!host.childNodes.length) hideSection("training"); // an exported model has no log
    return;
  }
  if (logged.length > 1) {
    host.append(
      legend(
        logged.map(({ run, i }) => ({
          name: run.name,
          color: seriesColor(i),
          mark: MARKS[i % 4],
          dash: DASHES[i % 4],
        })),
      ),
    );
  }
  host.append(
    el(
      "div",
      { class: "grid2" },
      // Losses of different data are drawn apart.
      (sameData(runs) ? [logged] : logged.map((one) => [one])).map((part) => {
        const name = part.length < logged.length ? `${part[0].run.name}: loss` : "Loss";
        return curve(part, `${name}, nats per token (marks: validation)`, (c) => c.loss.map((v) => [v]), {
          held: true,
          zero: false,
          places: 3,
        });
      }),
      curve(logged, "Entropy of the gate, nats (band: layers)", (c) => c.entropy, { places: 3 }),
      curve(logged, "Load CV: std / mean of tokens received (band: layers)", (c) => c.load_cv, {
        places: 3,
      }),
      curve(
        logged,
        "Smallest and largest load, % of tokens (dotted: equal load)",
        (c) => c.load.map(([a, b]) => [a, b]),
        { pair: true },
      ),
    ),
  );
}

// One quantity over steps, for all runs. values(c): [value], [mean, smallest, largest] or, as a pair,
// [smallest, largest].
function curve(logged, caption, values, { held = false, pair = false, zero = true, places = 1 }) {
  const say = (v) => (pair ? percent(v, 1) : fixed(v, places));
  const draw = (width) => {
    const all = logged.flatMap(({ c }) => [...values(c).flat(), ...(held ? c.validation.loss : [])]).filter(
      has,
    );
    const steps = [...new Set(logged.flatMap(({ c }) => c.steps))].sort((a, b) => a - b);
    const y = {
      domain: zero ? [0, Math.max(...all) * 1.06] : padded(all),
      format: pair ? (v) => percent(v, 0) : undefined,
    };
    const x = { domain: [0, Math.max(...steps)], label: "step", format: short };
    return axes(width, {
      x,
      y,
      height: 220,
      margin: { top: 8 },
      label: caption,
      paint(pane) {
        if (pair) [...new Set(logged.map(({ c }) => c.fair))].forEach((fair) => rule(pane, fair));
        for (const { c, i } of logged) {
          const color = seriesColor(i), dash = { "stroke-dasharray": DASHES[i % 4] }, own = values(c);
          if (own[0].length === 3) band(pane, own.map(([, low, high], j) => [c.steps[j], low, high]), color);
          line(pane, own.map(([v], j) => [c.steps[j], v]), color, dash);
          if (pair) line(pane, own.map(([, v], j) => [c.steps[j], v]), color, dash);
          if (held) {
            c.validation.steps.forEach((s, j) =>
              has(c.validation.loss[j]) &&
              pane.g.append(markAt(MARKS[i % 4], pane.X(s), pane.Y(c.validation.loss[j]), color, 3.6))
            );
          }
        }
        crosshair(
          pane,
          steps,
          (step) => [
            tipTitle(`step ${grouped(step)}`),
            ...logged.flatMap(({ run, c, i }) => {
              const j = c.steps.indexOf(step);
              if (j < 0) return [];
              const own = values(c)[j], v = c.validation.steps.indexOf(step);
              const text = pair
                ? `${say(own[0])} to ${say(own[1])}`
                : own.length === 3
                ? `${say(own[0])} (${say(own[1])} to ${say(own[2])})`
                : say(own[0]);
              return [
                tipRow(run.name, text, seriesColor(i)),
                held && v >= 0
                  ? tipRow(`${run.name}, validation`, say(c.validation.loss[v]), seriesColor(i))
                  : null,
              ];
            }).filter(has),
          ],
        );
      },
    });
  };
  return figure(caption, draw);
}
