// The page from its data. What the reader chooses is in `state`; who shows it listens.

const data = JSON.parse(document.getElementById("data").textContent);
const listeners = [];
const state = { run: 0, layer: 0, alpha: null, selection: null };
let waiting = false;

function listen(act) {
  listeners.push(act);
}

// Once a frame at most, however fast a slider is moved.
function setState(change) {
  Object.assign(state, change);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    listeners.forEach((act) => act());
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
    `grmoe ${data.grmoe}, ${data.made}. This page holds all its data and loads nothing.`;
  const shown = runs.findIndex((run) => run.sample);
  state.run = Math.max(0, shown);
  drawSummary(body("summary"), runs);
  drawTraining(body("training"), runs);
  drawFrontier(body("frontier"), runs, state);
  if (shown >= 0 || runs.length > 1) drawControls(document.getElementById("controls"), runs, state);
  drawDial(body("dial"), runs, state);
  drawTypes(body("types"), runs, state);
  drawText(body("text"), runs, state);
}

start();
