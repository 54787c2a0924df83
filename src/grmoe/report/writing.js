// Text that the model wrote at three budgets, side by side.

function drawWriting(host, runs, state) {
  if (runs.every((run) => !run.writing && !notesOf(run, ["writing"]).length)) return hideSection("writing");
  let shown = null;
  listen(() => {
    if (shown === state.run) return;
    shown = state.run;
    const run = runs[state.run];
    host.replaceChildren(...(run.writing ? writingView(run) : notesOf(run, ["model", "writing"])));
  });
}

function writingView(run) {
  const { prompt, texts, temperature, seed } = run.writing, { slider } = run;
  const of = (budget) => slider && slider.stops.find((s) => s.experts_per_token === budget);
  const isMark = (mark, budget) =>
    slider && slider[mark] && Math.abs(slider[mark].experts_per_token - budget) <= EQUAL;
  const columns = texts.map(({ budget, text }) => {
    const named = ["chosen", "trained"].filter((mark) => isMark(mark, budget)).map((mark) => `as ${mark}`);
    const stop = of(budget);
    return el(
      "article",
      { class: "card written" },
      el("h3", {}, has(budget) ? [`${fixed(budget, 2)} experts per token`, ...named].join(", ") : "As saved"),
      stop ? el("p", { class: "sub" }, `perplexity ${fixed(stop.perplexity, 2)}`) : null,
      el("p", { class: "prose" }, el("span", { class: "prompt" }, prompt), el("span", {}, text)),
    );
  });
  return [
    el(
      "p",
      {},
      (texts.length > 1
        ? "The same prompt (underlined) and the same seed at each budget. "
        : "The prompt is underlined. Texts at other budgets need the dial to be measured. ") +
        `Temperature ${digits(temperature)}, seed ${seed}.`,
    ),
    el("div", { class: "columns" }, columns),
  ];
}
