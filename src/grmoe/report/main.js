// Draws the page from its data. `state` holds what the reader chose; every view listens to it.

const data = JSON.parse(document.getElementById("data").textContent);
const listeners = [];
// budget, mark: where the dial at the top is. alpha, selection: set under "Layers", instead of what the dial says.
const state = { run: 0, layer: 0, budget: null, mark: null, alpha: null, selection: null };
let waiting = false;

// Acts now and after every change of the state.
function listen(act) {
  listeners.push(act);
  act();
}

// At most once per frame, however fast a slider moves.
function setState(change) {
  Object.assign(state, change);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    listeners.forEach((act) => act());
  });
}

// Shows a view of the chosen run, and makes a new view when another run is chosen.
function showRun(host, runs, state, makeView) {
  let shown = null, view = null;
  listen(() => {
    const run = runs[state.run];
    if (run !== shown) {
      shown = run;
      view = run.sample
        ? makeView(run, state)
        : { nodes: notesOf(run, ["model", "experts"]), update() {} };
      host.replaceChildren(...view.nodes);
    }
    view.update();
  });
}

const decoded = new Map();

function gatesOf(run) {
  if (!decoded.has(run)) {
    decoded.set(
      run,
      run.sample.layers.map((layer) => decodeGates(layer, gateSize(run), run.model.identity_experts)),
    );
  }
  return decoded.get(run);
}

function hideSection(id) {
  document.getElementById(id).hidden = true;
  document.querySelector(`nav a[href="#${id}"]`).hidden = true;
}

// The first screen at once, the rest part by part, so that the slider answers while it is drawn.
function start() {
  const { runs } = data, body = (id) => document.querySelector(`#${id} .body`);
  const shown = runs.findIndex((run) => run.sample);
  state.run = Math.max(0, shown);
  Object.assign(state, firstState(runs[state.run]));
  drawDial(body("dial"), runs, state);
  drawNext(body("next"), state);
  drawRules(document.getElementById("rules"), runs, state);
  const parts = [
    () => drawWriting(body("writing"), runs, state),
    () => drawFrontier(body("frontier"), runs, state),
    () => drawSummary(body("summary"), runs),
    () => drawTraining(body("training"), runs),
    () => (shown >= 0 || runs.length > 1) && drawControls(document.getElementById("controls"), runs, state),
    () => showRun(body("layers"), runs, state, layersView),
    () => drawTypes(body("types"), runs, state),
    () => showRun(body("text"), runs, state, textView),
    () => document.documentElement.setAttribute("data-drawn", ""),
  ];
  const next = () => {
    const draw = parts.shift();
    if (!draw) return;
    draw();
    setTimeout(next);
  };
  setTimeout(next);
}

start();
