// The controls of the layers: block, α, and how experts are selected. They leave the dial at the top as it is.

// Positions of the slider, 0.1 to 10.
const ALPHAS = Array.from({ length: 81 }, (_, i) => niceAlpha(10 ** (i / 40 - 1)));

function niceAlpha(value) {
  const round = Number(value.toPrecision(2));
  return Math.abs(round / value - 1) < 0.003 ? round : Number(value.toPrecision(3));
}

const nearest = (alpha) =>
  ALPHAS.reduce(
    (best, a, i) => (Math.abs(Math.log(a / alpha)) < Math.abs(Math.log(ALPHAS[best] / alpha)) ? i : best),
    0,
  );

// The bar that stays at the top of the window: model, block, α.
function drawControls(host, runs, state) {
  const slider = el("input", {
    type: "range",
    id: "alpha",
    min: 0,
    max: ALPHAS.length - 1,
    step: 1,
    "aria-label": "α of all layers",
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
    { type: "button", id: "alpha-reset", onclick: () => setState({ alpha: null, selection: null }) },
    "follow the dial",
  );
  const layers = el("span", { id: "layer-choice" });
  slider.addEventListener("input", () => setState({ alpha: ALPHAS[slider.value] }));
  number.addEventListener(
    "change",
    () => number.value !== "" && Number(number.value) >= 0 && setState({ alpha: Number(number.value) }),
  );
  const choice = runs.length > 1 ? runChooser(runs, state) : null;
  host.append(...[
    choice,
    layers,
    el("div", { class: "alpha" }, el("label", { for: "alpha" }, "α"), slider, number, reset),
  ].filter(has));
  let run = null, block = null;
  const update = () => {
    const shown = runs[state.run], dial = shown.sample && shown.sample.dial;
    if (run !== shown) {
      run = shown;
      const names = shown.model ? shown.model.moe_layers.map((l) => `block ${l}`) : [];
      block = names.length > 1 ? chooser("show", names, state.layer, (i) => setState({ layer: i })) : null;
      layers.replaceChildren(...[block].filter(has));
    }
    if (choice) choice.update(state.run);
    if (block) block.update(state.layer);
    for (const node of [slider, number, reset]) node.disabled = !dial;
    if (!dial) return;
    const alphas = shown.model.alphas.map((_, i) => settingOf(shown, state, i).alpha);
    const middle = Math.exp(mean(alphas.map((a) => Math.log(Math.max(a, 1e-3)))));
    slider.value = nearest(middle);
    slider.setAttribute("aria-valuetext", `α = ${sayAlphas(alphas)}`);
    number.value = new Set(alphas).size === 1 ? Number(digits(alphas[0], 4)) : "";
    number.placeholder = sayAlphas(alphas);
    reset.setAttribute("aria-pressed", !has(state.alpha) && !state.selection);
  };
  listen(update);
}

// How experts are selected: by weight, by mass, top-k, or all of them.
function selectionControls(run, state) {
  const N = gateSize(run);
  const tau = el("input", {
    type: "range",
    id: "tau",
    min: 0.05,
    max: 1,
    step: 0.01,
    "aria-label": "τ, the probability to reach or the least weight",
  });
  const tauText = el("output", { for: "tau" });
  const cap = el("input", { type: "number", id: "cap", min: 1, max: N, step: 1 });
  const kinds = { at_least: "weight ≥ τ", mass: "mass τ", topk: "top-k", dense: "all experts" };
  const radios = Object.entries(kinds).map(([kind, name]) =>
    el(
      "label",
      {},
      el("input", {
        type: "radio",
        name: "kind",
        value: kind,
        onchange: () => setState({ selection: { ...plainSelection(run, state), kind } }),
      }),
      name,
    )
  );
  tau.addEventListener(
    "input",
    () => setState({ selection: { ...plainSelection(run, state), tau: Number(tau.value) } }),
  );
  cap.addEventListener(
    "change",
    () =>
      setState({
        selection: {
          ...plainSelection(run, state),
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
  );
  node.update = () => {
    const { kind, tau: value, k } = plainSelection(run, state);
    node.querySelectorAll("input[type=radio]").forEach((radio) => (radio.checked = radio.value === kind));
    tau.value = value;
    tauText.textContent = digits(value);
    cap.value = k;
    tauLabel.hidden = kind !== "mass" && kind !== "at_least";
    node.hidden = kind === "own";
    capLabel.hidden = kind === "dense" || kind === "threshold";
    capLabel.firstChild.textContent = kind === "topk" ? "k =" : "at most";
  };
  return node;
}

// The selection of the shown layer without the bias of a budget, for controls that set one rule for all layers.
function plainSelection(run, state) {
  const { kind, tau, k } = settingOf(run, state, state.layer).selection;
  return { kind, tau: tau || 0.5, k };
}
