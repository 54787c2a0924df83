// Draws the page from its data. `state` holds what the reader chose; every view listens to it.

const data = JSON.parse(document.getElementById("data").textContent);
const listeners = [];
const state = { run: 0, layer: 0, alpha: null, selection: null };
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
      run.sample.layers.map((layer) => decodeGates(layer, run.model.experts)),
    );
  }
  return decoded.get(run);
}

function start() {
  const { runs } = data, body = (id) => document.querySelector(`#${id} .body`);
  document.getElementById("title").textContent = runs.map((run) => run.name).join(" · ");
  document.getElementById("subtitle").textContent = `grmoe report: ${
    runs.length > 1 ? `${runs.length} runs side by side` : runs[0].path
  }`;
  document.getElementById("footer").textContent =
    `grmoe ${data.grmoe}, ${data.made}. This page contains all its data and loads nothing.`;
  const shown = runs.findIndex((run) => run.sample);
  state.run = Math.max(0, shown);
  drawSummary(body("summary"), runs);
  drawTraining(body("training"), runs);
  drawFrontier(body("frontier"), runs, state);
  if (shown >= 0 || runs.length > 1) drawControls(document.getElementById("controls"), runs, state);
  showRun(body("dial"), runs, state, dialView);
  drawTypes(body("types"), runs, state);
  showRun(body("text"), runs, state, textView);
}

start();
