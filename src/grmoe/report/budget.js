// What a budget means: α and the selection of every layer, and the perplexity and speed that were measured for it.

// Experts that a gate chooses from: those that compute, and identity experts.
const gateSize = (run) => run.model.experts + run.model.identity_experts;

// τ, α, cap and bias of every layer at a budget, as `grmoe.routing.curve_numbers` has them. Between two points, τ and
// bias are linear and α is geometric. Where the caps of a layer differ, layers move to the upper point one after another,
// and where caps alone decide, expert by expert.
function curveNumbers(curve, budget, L) {
  const counts = curve.map((p) => p.experts_per_token);
  const after = counts.findIndex((c) => c > budget);
  const at = Math.min(after < 0 ? curve.length : after, curve.length - 1);
  const below = pointLayers(curve[Math.max(0, at - 1)], L), above = pointLayers(curve[at], L);
  const share = at ? (budget - counts[at - 1]) / (counts[at] - counts[at - 1]) : 1;
  const apart = below.map((_, i) => i).filter((i) => below[i].cap !== above[i].cap);
  const grown = apart.map((i) => above[i].cap - below[i].cap);
  const gains = grown.some((g) => g < 0) ? grown.map(() => 1) : grown; // a smaller cap with a larger τ
  let left = share * gains.reduce((sum, g) => sum + g, 0) + 1e-9;
  const got = {};
  for (const [place, i] of apart.entries()) {
    const gain = gains[place], inSteps = gain > 1 && byCap(below[i]) && byCap(above[i]);
    got[i] = Math.min(gain, inSteps ? Math.floor(left) : left >= gain ? gain : 0);
    left -= got[i];
    if (got[i] < gain) break;
  }
  return below.map((a, i) => {
    const b = above[i], gain = gains[apart.indexOf(i)];
    if (share === 0 || share === 1) return share === 1 ? b : a;
    if (a.cap === b.cap) return mixPoints(a, b, share);
    if (got[i] > 0 && got[i] < gain) return { ...mixPoints(a, b, got[i] / gain), cap: a.cap + got[i] };
    return got[i] ? b : a;
  });
}

// Whether the cap alone decides.
const byCap = ({ tau }) => tau >= 1 || (-NO_WEIGHT <= tau && tau < 0);

function mixPoints(a, b, share) {
  const mix = (x, y) => (1 - share) * x + share * y;
  const geometric = a.alpha !== b.alpha && Math.min(a.alpha, b.alpha) > 0;
  const zero = (a.bias || b.bias || []).map(() => 0);
  return {
    tau: a.tau + share * (b.tau - a.tau), // equal ones stay as they are
    alpha: geometric ? a.alpha ** (1 - share) * b.alpha ** share : mix(a.alpha, b.alpha),
    cap: a.cap,
    bias: a.bias || b.bias ? (a.bias || zero).map((x, e) => mix(x, (b.bias || zero)[e])) : null,
  };
}

const NO_WEIGHT = 1e-6; // a weight that every expert has: the cap alone decides

// A curve by weight has no τ. A negative τ stands for the least weight, as in the routers.
function pointLayers({ tau, weight, alpha, cap, bias }, L) {
  const of = (value, i) => (Array.isArray(value) ? value[i] : value);
  return Array.from({ length: L }, (_, i) => ({
    tau: has(weight) ? -of(weight, i) : of(tau, i),
    alpha: of(alpha, i),
    cap: of(cap, i),
    bias: bias ? bias[i] : null,
  }));
}

// -- the setting of a layer -------------------------------------------------------------------------

// {alpha, selection} of a layer: what was set under "Layers", else what the dial at the top says, else as saved.
function settingOf(run, state, layer) {
  const { alpha, selection } = dialled(run, state, layer);
  return {
    alpha: !run.sample.dial ? 1 : has(state.alpha) ? state.alpha : alpha,
    selection: state.selection || selection,
  };
}

function dialled(run, state, layer) {
  const { curve, moe_layers, alphas, selection } = run.model;
  if (has(state.budget) && curve) {
    const numbers = curveNumbers(curve, state.budget, moe_layers.length)[layer], { tau, alpha, cap, bias } = numbers;
    const byWeight = tau < -NO_WEIGHT;
    const rule = byWeight ? { kind: "at_least", tau: -tau } : { kind: "mass", tau: tau < 0 ? 1 : Math.min(1, tau) };
    return { alpha, selection: { ...rule, k: cap, bias, byCap: byCap(numbers) } };
  }
  const own = state.mark && run.dial && run.dial[state.mark].setting;
  if (!own) return { alpha: alphas[layer], selection };
  const one = (value) => (Array.isArray(value) ? value[layer] : value);
  return {
    alpha: one(own.alpha),
    selection: { kind: own.selection, tau: own.selection_tau, k: one(own.cap || own.num_experts_per_tok) },
  };
}

// -- what was measured ------------------------------------------------------------------------------

const EQUAL = 5e-5; // budgets are kept to four places

// Where a mark of the slider is, as a state. "chosen" is a budget if the curve has it.
function markState(run, mark) {
  const { stops, exact } = run.slider, point = run.slider[mark];
  const stop = stops.find((s) => Math.abs(s.experts_per_token - point.experts_per_token) <= EQUAL);
  const budget = exact && mark === "chosen" && stop ? stop.experts_per_token : null;
  return { budget, mark, alpha: null, selection: null };
}

// Perplexity and speed at a place of the slider. how: in words, whether they were measured.
function measuredAt(slider, state) {
  if (state.mark) {
    return { ...slider[state.mark], how: "Measured at this setting." };
  }
  const { stops, trained } = slider, budget = state.budget;
  const stop = stops.find((s) => Math.abs(s.experts_per_token - budget) <= EQUAL);
  const timed = (stop && stop.speed) || speedAt(slider.speeds, budget);
  const speedHow = !timed
    ? (slider.speeds.length ? " No speed was measured here." : "")
    : timed.between
    ? ` Speed is interpolated between settings timed at ${timed.between.map((v) => fixed(v, 2)).join(" and ")}.`
    : "";
  if (stop) return { ...stop, speed: timed, how: `Perplexity is measured at this setting.${speedHow}` };
  const above = Math.max(1, stops.findIndex((s) => s.experts_per_token > budget));
  const a = stops[above - 1], b = stops[above];
  const share = (budget - a.experts_per_token) / (b.experts_per_token - a.experts_per_token);
  const perplexity = a.perplexity ** (1 - share) * b.perplexity ** share; // the loss is linear, as in `curve_loss`
  const ends = [a, b].map((s) => fixed(s.experts_per_token, 2)).join(" and ");
  return {
    experts_per_token: budget,
    perplexity,
    increase: trained ? { value: perplexity / trained.perplexity - 1 } : null,
    speed: timed,
    how: `Perplexity is interpolated between settings measured at ${ends} experts per token.${speedHow}`,
  };
}

// Linear between the two timed settings around a budget; null outside.
function speedAt(speeds, budget) {
  const exact = speeds.find((s) => Math.abs(s.experts_per_token - budget) <= EQUAL);
  if (exact) return exact.speed;
  const above = speeds.findIndex((s) => s.experts_per_token > budget);
  if (above < 1) return null;
  const a = speeds[above - 1], b = speeds[above];
  const share = (budget - a.experts_per_token) / (b.experts_per_token - a.experts_per_token);
  const mix = (x, y) => (1 - share) * x + share * y;
  const pairs = (key) => a.speed[key].map((v, i) => mix(v, b.speed[key][i]));
  return {
    tokens_per_second: mix(a.speed.tokens_per_second, b.speed.tokens_per_second),
    relative: mix(a.speed.relative, b.speed.relative),
    relative_interval: pairs("relative_interval"),
    between: [a.experts_per_token, b.experts_per_token],
  };
}
