// The models that are served: their steps, and of a run that is still learning its curve and its answers. page.js, which
// is loaded next, has the rest.
"use strict";
const MOST_ANSWERS = 30;
let models = [];

const modelNamed = (id) => models.find((model) => model.id === id);
const stepOf = (model) => (model.step === undefined ? "starting again" : `step ${model.step.toLocaleString("en")}`);

function badges() {
  const model = modelNamed($("model").value);
  $("step").textContent = stepOf(model);
  $("about").textContent = `${compact(model.parameters)} parameters · ${model.engine} · ${model.device}`;
  const other = modelNamed($("other").value);
  $("otherstep").textContent = other ? stepOf(other) : "";
  options.elements.max_tokens.max = Math.max(1, model.max_model_len - 1);
  outputs();
  document.title = `${model.id} – raygpt`;
}
const compact = (n) => Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(n);

async function loadModels() {
  const found = (await (await call("v1/models")).json()).data;
  if (!models.length)
    for (const id of ["model", "other"]) $(id).replaceChildren(...found.map((model) => new Option(model.id, model.id)));
  models = found;
  $("compare").disabled = models.length < 2;
  badges();
}

async function follow() {
  const id = $("model").value, before = modelNamed(id)?.step;
  try {
    await loadModels();
    const model = modelNamed(id);
    $("watch").hidden = !model.follow;
    if (!model.follow) return;
    drawCurve(await (await call(`losses?model=${encodeURIComponent(id)}`)).json());
    if (model.step !== before) {
      $("step").classList.remove("new");
      requestAnimationFrame(() => $("step").classList.add("new"));
      if ($("watching").checked && origin) await answerAgain(model);
    }
  } catch (error) {
    say(error.message, true);
  }
}

/** The prompt of the last answer, with its seed, by the checkpoint that has just come. */
async function answerAgain(model) {
  const prompt = plain(origin.before);
  let text = "", step = model.step;
  for await (const choice of completion({ ...asked(model.id, await seen(model.id, prompt), origin.seed), logprobs: 0 })) [text, step] = [text + choice.text, choice.step];
  const item = document.createElement("li"), name = document.createElement("span"), words = document.createElement("p"), given = document.createElement("b");
  name.className = "soft";
  name.textContent = `step ${step.toLocaleString("en")}`;
  given.textContent = prompt;
  words.append(given, text);
  item.append(name, words);
  $("answers").prepend(item);
  while ($("answers").children.length > MOST_ANSWERS) $("answers").lastChild.remove();
}

function drawCurve({ loss, val_loss: validation, steps }) {
  const all = [...loss, ...validation];
  $("curve").hidden = all.length < 2;
  if (all.length < 2) return;
  const right = Math.max(...all.map(([x]) => x)), values = all.map(([, y]) => y), low = Math.min(...values), high = Math.max(...values);
  const at = ([x, y]) => `${((160 * x) / right).toFixed(1)},${(34 - (32 * (y - low)) / (high - low || 1)).toFixed(1)}`;
  const svg = $("curve").querySelector("svg");
  svg.replaceChildren(...[["loss", loss], ["val", validation]].filter(([, points]) => points.length).map(([name, points]) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    path.setAttribute("d", `M${points.map(at).join("L")}`);
    return path;
  }));
  const isValidated = validation.length > 1, last = (isValidated ? validation : loss).at(-1) ?? validation.at(-1);
  $("curve").querySelector("figcaption").textContent =
    `${isValidated ? "validation" : "training"} loss ${last[1].toFixed(3)}\nstep ${right.toLocaleString("en")}${steps ? ` of ${steps.toLocaleString("en")}` : ""}`;
}
