// Which expert leads which tokens: the tables of `grmoe analyze`, one layer at a time.

function drawTypes(host, runs, state) {
  let before = {};
  listen(() => {
    if (before.run === state.run && before.layer === state.layer) return;
    before = { ...state };
    const run = runs[state.run];
    const view = run.analysis ? typesView(run.analysis, run.analysis.layers[state.layer]) : [];
    host.replaceChildren(...notesOf(run, ["model", "experts"]), ...view);
  });
}

function typesView(analysis, layer) {
  const present = analysis.domain_tokens.map((n, i) => (n ? i : -1)).filter((i) => i >= 0);
  const largest = (rows) => Math.max(0.3, ...rows.flat().filter(has));
  const types = analysis.types.map((name, i) => ({ name, tokens: analysis.type_tokens[i] }));
  const domains = present.map((i) => ({ name: analysis.domains[i], tokens: analysis.domain_tokens[i] }));
  // Shares of a row and of a column; null where there is nothing.
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const columns = types.map((_, c) => sum(layer.counts.map((row) => row[c])));
  const ofExpert = layer.counts.map((row) => row.map((n) => (sum(row) ? n / sum(row) : null)));
  const ofType = layer.counts.map((row) => row.map((n, c) => (columns[c] ? n / columns[c] : null)));
  const ofDomain = layer.counts.map((_, e) => present.map((d) => layer.domain_of_expert[d][e]));
  const aboutType = (e, c) =>
    [
      tipTitle(`expert ${e}, ${types[c].name}`),
      tipRow("tokens it leads", grouped(layer.counts[e][c])),
      tipRow("share of the type's tokens", percent(ofType[e][c])),
      tipRow("share of the expert's tokens", percent(ofExpert[e][c])),
      layer.kappa ? tipRow("κ of the expert", digits(layer.kappa[e])) : null,
    ].filter(has);
  const aboutDomain = (e, c) => [
    tipTitle(`expert ${e}, ${domains[c].name}`),
    tipRow("share of the domain's tokens", percent(ofDomain[e][c])),
  ];
  return [
    el(
      "p",
      {},
      `The leading experts of ${grouped(analysis.tokens)} tokens, at the saved α (${digits(layer.alpha)}), block ${layer.layer}. ` +
        `Text: ${analysis.text}. ${informationText(layer)}`,
    ),
    el(
      "div",
      { class: "grid2" },
      heatMap("Which expert leads a type: % of the column", types, ofType, largest(ofType), aboutType),
      heatMap("Which types an expert leads: % of the row", types, ofExpert, 1, aboutType),
      present.length > 1
        ? heatMap("Which expert leads a domain: % of the column", domains, ofDomain, largest(ofDomain), aboutDomain)
        : null,
    ),
  ];
}

function informationText(layer) {
  const found = layer.information;
  if (!found || !has(found.value)) return "";
  return `Block ${layer.layer}: the mutual information of expert and type is ${fixed(found.value, 3)} nats. ` +
    `If a hash of the token chose the expert, it would be ${fixed(found.by_token_mean, 3)}.`;
}

const HOTTEST = 60; // % of the colour: text stays readable on it

// One row per expert, one column per kind of token.
function heatMap(caption, columns, rows, top, content) {
  const head = el(
    "tr",
    {},
    el("th", { scope: "col", class: "corner" }, "expert"),
    columns.map(({ name, tokens }) =>
      el(
        "th",
        { scope: "col", title: `${name}: ${grouped(tokens)} tokens` },
        el("span", {}, clipped(name, 16)),
      )
    ),
  );
  const N = rows.length;
  const body = rows.map((row, e) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el("i", { class: "swatch", style: { background: expertColor(e, N) } }),
        String(e),
      ),
      row.map((value, c) => {
        const strength = has(value) ? Math.min(1, value / top) : 0;
        const cell = el(
          "td",
          {},
          has(value) ? (100 * value).toFixed(0) : "–",
        );
        cell.style.setProperty("--heat", `${Math.round(HOTTEST * strength)}%`);
        return explain(cell, () => content(e, c));
      }),
    )
  );
  return el(
    "figure",
    {},
    el("figcaption", {}, caption),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      el("table", { class: N > 24 ? "heat dense" : "heat" }, el("thead", {}, head), el("tbody", {}, body)),
    ),
  );
}
