// The top of the page: the slider of budgets with what was measured along it, the picture of all rules, the commands.

const SNAP = 0.006; // of the slider's range: so close to a measured setting, it is that setting

// A choice that follows the state. options: their names.
function chooser(name, options, value, act) {
  const select = el(
    "select",
    { onchange: () => act(Number(select.value)) },
    options.map((text, i) => el("option", { value: i }, text)),
  );
  const node = el("label", { class: "choice" }, el("span", {}, name), select);
  node.update = (i) => (select.value = i);
  node.update(value);
  return node;
}

const runChooser = (runs, state) =>
  chooser("model", runs.map((r) => r.name), state.run, (i) => setState({ ...firstState(runs[i]), run: i }));

// The setting a run is first shown at: what the dial chose, or what is saved with the model.
function firstState(run) {
  const nothing = { layer: 0, budget: null, mark: null, alpha: null, selection: null };
  if (run.slider && run.slider.chosen) return { ...nothing, ...markState(run, "chosen") };
  if (run.slider) return { ...nothing, budget: run.slider.stops[run.slider.stops.length - 1].experts_per_token };
  return nothing;
}

function drawDial(host, runs, state) {
  const choice = runs.length > 1 ? runChooser(runs, state) : null;
  const holder = el("div");
  host.append(...[choice, holder].filter(has));
  let shown = null, view = null;
  listen(() => {
    const run = runs[state.run];
    if (choice) choice.update(state.run);
    if (run !== shown) {
      shown = run;
      view = run.slider ? sliderView(run, state) : { nodes: notesOf(run, ["model", "frontier"]), update() {} };
      holder.replaceChildren(...view.nodes);
    }
    view.update();
  });
}

function sliderView(run, state) {
  const { slider } = run, { stops } = slider;
  const low = stops[0].experts_per_token, high = stops[stops.length - 1].experts_per_token;
  const input = el("input", { type: "range", id: "budget", min: low, max: high, step: "any" });
  input.addEventListener("input", () => {
    const value = Number(input.value);
    const near = stops.map((s) => s.experts_per_token).find((c) => Math.abs(c - value) <= SNAP * (high - low));
    setState({ budget: has(near) ? near : value, mark: null, alpha: null, selection: null });
  });
  const names = { chosen: "As chosen", trained: "As trained" };
  const marks = Object.keys(names).filter((mark) => slider[mark]);
  const buttons = marks.map((mark) =>
    el(
      "button",
      { type: "button", "data-mark": mark, onclick: () => setState(markState(run, mark)) },
      el("i", { class: `pin ${mark}`, "aria-hidden": "true" }),
      `${names[mark]}: ${fixed(slider[mark].experts_per_token, 2)}`,
    )
  );
  const place = (count) => ({ "--at": Math.max(0, Math.min(1, (count - low) / (high - low || 1))) });
  const pin = (kind, count) => {
    const node = el("i", { class: kind });
    node.style.setProperty("--at", place(count)["--at"]);
    return node;
  };
  const rail = el(
    "div",
    { class: "rail", "aria-hidden": "true" },
    stops.map((s) => pin("stop", s.experts_per_token)),
    marks.map((mark) => pin(`pin ${mark}`, slider[mark].experts_per_token)),
  );
  const tiles = el("dl", { class: "readout" }), how = el("p", { class: "how", id: "how" });
  input.setAttribute("aria-describedby", "how");
  return {
    nodes: [
      el(
        "div",
        { class: "turn" },
        el("label", { for: "budget" }, `Budget: experts per token, ${fixed(low, 2)} to ${fixed(high, 2)}`),
        el("div", { class: "track" }, input, rail),
        el("div", { class: "marks", role: "group", "aria-label": "Settings with a name" }, buttons),
        tiles,
        how,
      ),
    ],
    update() {
      // A setting made under "Layers" is not one that was measured: the dial stays where it was.
      const here = measuredAt(slider, state);
      input.value = here.experts_per_token;
      input.setAttribute("aria-valuetext", sayMeasured(here));
      tiles.replaceChildren(...readout(run, here));
      how.textContent = here.how;
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", state.mark === marks[i]));
    },
  };
}

function sayMeasured({ experts_per_token: experts, perplexity, increase, speed }) {
  const grown = increase ? ` (${signed(increase.value)})` : "";
  const timed = speed ? `, ${fixed(speed.relative, 2)} times the trained speed` : "";
  return `${fixed(experts, 2)} experts per token, perplexity ${fixed(perplexity, 2)}${grown}${timed}`;
}

function readout(run, { experts_per_token: experts, perplexity, increase, speed }) {
  const { trained } = run.slider;
  const interval = increase && has(increase.low) && increase.low !== increase.high
    ? ` (${signed(increase.low)} to ${signed(increase.high)})`
    : "";
  const rows = [
    [
      "experts per token",
      fixed(experts, 2),
      `of ${run.model.experts}${trained ? `; trained ${fixed(trained.experts_per_token, 2)}` : ""}`,
      "experts",
    ],
    ["perplexity", fixed(perplexity, 2), increase ? `${signed(increase.value)}${interval}` : "", "perplexity"],
    speed
      ? [
        "speed",
        `${fixed(speed.relative, 2)} ×`,
        `${grouped(speed.tokens_per_second)} tokens/s; ${
          speed.relative_interval.map((v) => fixed(v, 2)).join(" to ")
        } ×`,
        "speed",
      ]
      : ["speed", "–", "not measured", "speed"],
  ];
  return rows.map(([name, value, more, key]) =>
    el(
      "div",
      { class: "tile", "data-read": key },
      el("dt", {}, name),
      el("dd", { class: "value" }, value),
      el("dd", { class: "more" }, more),
    )
  );
}

// A button beside each command, and only the commands of the chosen model.
function drawNext(host, state) {
  const lists = [...host.children], said = el("p", { class: "unseen", role: "status" });
  host.append(said);
  for (const code of host.querySelectorAll("li code")) {
    const button = el("button", { type: "button", class: "copy", "aria-label": `Copy: ${code.textContent}` }, "Copy");
    button.addEventListener("click", async () => {
      const done = await copyText(code);
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      said.textContent = done ? `Copied: ${code.textContent}` : "Selected. Press Ctrl+C to copy.";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    code.after(button);
  }
  listen(() => lists.forEach((list, i) => (list.hidden = i !== state.run)));
}

// Copies the text of a node, or selects it where the browser does not allow that.
async function copyText(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {
    const range = document.createRange();
    range.selectNodeContents(node);
    const selected = getSelection();
    selected.removeAllRanges();
    selected.addRange(range);
    return false;
  }
}
