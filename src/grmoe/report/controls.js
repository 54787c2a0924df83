// The controls: run, layer, α, and how experts are selected.

// Positions of the slider, 0.1 to 10.
const ALPHAS = Array.from({ length: 81 }, (_, i) => niceAlpha(10 ** (i / 40 - 1)));

function niceAlpha(value) {
  const round = Number(value.toPrecision(2));
  return Math.abs(round / value - 1) < 0.003 ? round : Number(value.toPrecision(3));
}

// α of a layer: the one set here, or the one saved with the model. 1 for gates without a dial.
function alphaOf(run, layer, state) {
  if (!run.sample.dial) return 1;
  if (Array.isArray(state.alpha)) return state.alpha[layer];
  return has(state.alpha) ? state.alpha : run.model.alphas[layer];
}

// α of every layer and the selection at a budget, as `model.set_budget` has them: τ is linear and α geometric between
// two points of the curve, and so is the bias of the choice. A τ that differs by layer is shown as its mean.
function atBudget(run, budget) {
  const { curve, moe_layers } = run.model;
  const each = (value) => (Array.isArray(value) ? value : moe_layers.map(() => value));
  const above = Math.max(1, curve.findIndex((p) => p.experts_per_token >= budget));
  const a = curve[Math.min(above, curve.length) - 1], b = curve[Math.min(above, curve.length - 1)];
  const share = a === b ? 0 : (budget - a.experts_per_token) / (b.experts_per_token - a.experts_per_token);
  const alphas = each(a.alpha).map((x, i) => x ** (1 - share) * each(b.alpha)[i] ** share);
  const tau = (1 - share) * mean(each(a.tau)) + share * mean(each(b.tau));
  const zero = moe_layers.map(() => Array(run.model.experts).fill(0));
  const [low, high] = [a.bias || zero, b.bias || zero];
  const bias = a.bias || b.bias
    ? low.map((layer, i) => layer.map((x, e) => (1 - share) * x + share * high[i][e]))
    : null;
  const saved = alphas.every((x, i) => Math.abs(x - run.model.alphas[i]) < 1e-9);
  return {
    alpha: saved ? null : alphas,
    selection: { kind: "mass", tau, k: Math.max(...each(a.cap), ...each(b.cap)), bias },
  };
}

// The selection the page starts with: the one `grmoe dial` chose, or mass 0.5.
function firstSelection(run) {
  const own = run.model.selection;
  if (!run.sample || !run.sample.dial) return own;
  if (run.model.budget && run.model.curve) return atBudget(run, run.model.budget).selection;
  const chosen = run.dial && run.dial.chosen.setting;
  if (chosen && chosen.selection === "mass") {
    return { kind: "mass", tau: chosen.selection_tau, k: chosen.num_experts_per_tok };
  }
  return own.kind === "mass" ? own : { kind: "mass", tau: 0.5, k: own.k };
}

const nearest = (alpha) =>
  ALPHAS.reduce(
    (best, a, i) => (Math.abs(Math.log(a / alpha)) < Math.abs(Math.log(ALPHAS[best] / alpha)) ? i : best),
    0,
  );

// The bar that stays at the top of the window: run, layer, α.
function drawControls(host, runs, state) {
  const choose = (name, options, value, act) =>
    el(
      "label",
      { class: "choice" },
      el("span", {}, name),
      el(
        "select",
        { onchange: (event) => act(Number(event.target.value)) },
        options.map((text, i) => el("option", { value: i, selected: i === value }, text)),
      ),
    );
  const slider = el("input", {
    type: "range",
    id: "alpha",
    min: 0,
    max: ALPHAS.length - 1,
    step: 1,
    "aria-label": "α, the dial",
  });
  const number = el("input", {
    type: "number",
    id: "alpha-number",
    min: 0,
    step: "any",
    "aria-label": "α as a number",
  });
  const reset = el(
    "button",
    { type: "button", id: "alpha-reset", onclick: () => setState({ alpha: null }) },
    "as saved",
  );
  const layers = el("span", { id: "layer-choice" });
  slider.addEventListener("input", () => setState({ alpha: ALPHAS[slider.value] }));
  number.addEventListener(
    "change",
    () => number.value !== "" && Number(number.value) >= 0 && setState({ alpha: Number(number.value) }),
  );
  host.append(...[
    runs.length > 1
      ? choose(
        "run",
        runs.map((r) => r.name),
        state.run,
        (i) => setState({ run: i, layer: 0, alpha: null, selection: null }),
      )
      : null,
    layers,
    el("div", { class: "alpha" }, el("label", { for: "alpha" }, "α"), slider, number, reset),
  ].filter(has));
  let run = null;
  const update = () => {
    const shown = runs[state.run], dial = shown.sample && shown.sample.dial;
    if (run !== shown) {
      run = shown;
      const names = shown.model ? shown.model.moe_layers.map((l) => `layer ${l}`) : [];
      layers.replaceChildren(
        ...(names.length > 1 ? [choose("layer", names, state.layer, (i) => setState({ layer: i }))] : []),
      );
    }
    for (const node of [slider, number, reset]) node.disabled = !dial;
    if (!dial) return;
    const alphas = shown.model.alphas.map((_, i) => alphaOf(shown, i, state));
    const middle = Math.exp(mean(alphas.map((a) => Math.log(Math.max(a, 1e-3)))));
    slider.value = nearest(middle);
    slider.setAttribute("aria-valuetext", `α = ${sayAlphas(alphas)}`);
    number.value = new Set(alphas).size === 1 ? Number(digits(alphas[0], 4)) : "";
    number.placeholder = sayAlphas(alphas);
    reset.setAttribute("aria-pressed", !has(state.alpha));
  };
  listen(update);
}

// How experts are selected: by mass, top-k, or all of them.
function selectionControls(run, state) {
  const N = run.model.experts;
  const tau = el("input", {
    type: "range",
    id: "tau",
    min: 0.05,
    max: 1,
    step: 0.01,
    "aria-label": "τ, the probability to reach",
  });
  const tauText = el("output", { for: "tau" });
  const cap = el("input", { type: "number", id: "cap", min: 1, max: N, step: 1 });
  const { curve } = run.model;
  const budget = el("input", {
    type: "range",
    id: "budget",
    min: curve ? curve[0].experts_per_token : 1,
    max: curve ? curve[curve.length - 1].experts_per_token : 1,
    step: "any",
    "aria-label": "budget, experts per token",
  });
  const budgetText = el("output", { for: "budget" });
  budget.addEventListener("input", () => {
    budgetText.textContent = fixed(Number(budget.value), 2);
    setState(atBudget(run, Number(budget.value)));
  });
  if (curve) budget.value = run.model.budget || curve[curve.length - 1].experts_per_token;
  budgetText.textContent = fixed(Number(budget.value), 2);
  const kinds = { mass: "mass τ", topk: "top-k", dense: "all experts" };
  const radios = Object.entries(kinds).map(([kind, name]) =>
    el(
      "label",
      {},
      el("input", {
        type: "radio",
        name: "kind",
        value: kind,
        onchange: () => setState({ selection: { ...selectionOf(run, state), kind } }),
      }),
      name,
    )
  );
  tau.addEventListener(
    "input",
    () => setState({ selection: { ...selectionOf(run, state), tau: Number(tau.value) } }),
  );
  cap.addEventListener(
    "change",
    () =>
      setState({
        selection: {
          ...selectionOf(run, state),
          k: Math.max(1, Math.min(N, Math.round(Number(cap.value) || 1))),
        },
      }),
  );
  const tauLabel = el("label", { class: "tau" }, "τ", tau, tauText);
  const capLabel = el("label", {}, el("span", {}, "at most"), cap, "experts");
  const node = el(
    "fieldset",
    { class: "selection", disabled: !run.sample.dial },
    el("legend", {}, "Select experts by"),
    ...radios,
    tauLabel,
    capLabel,
    ...(curve ? [el("label", { class: "tau" }, "budget", budget, budgetText)] : []),
  );
  node.update = () => {
    const { kind, tau: value, k } = selectionOf(run, state);
    node.querySelectorAll("input[type=radio]").forEach((radio) => (radio.checked = radio.value === kind));
    tau.value = value || 0.5;
    tauText.textContent = digits(value || 0.5);
    cap.value = k;
    tauLabel.hidden = kind !== "mass";
    node.hidden = kind === "own";
    capLabel.hidden = kind === "dense" || kind === "threshold";
    capLabel.firstChild.textContent = kind === "mass" ? "at most" : "k =";
  };
  return node;
}

// Of one layer, or of all of them without the bias of a budget, which differs by layer.
function selectionOf(run, state, layer) {
  const { bias, ...selection } = state.selection || firstSelection(run);
  return bias && has(layer) ? { ...selection, bias: bias[layer] } : selection;
}
