// What is known of one thing: chosen by a link, shown beside the report, and named in the address.

const inspector = document.getElementById('inspector');
const SHOWN = { value: showValue, collective: showCollective, parameter: showParameter, module: showModule, annotation: showAnnotation };

function follow() {
  const [, kind, name] = /^#(\w+):(.*)$/.exec(location.hash) || [];
  const shown = kind && SHOWN[kind] && SHOWN[kind](decoded(name));
  document.querySelectorAll('.chosen').forEach(each => each.classList.remove('chosen'));
  inspector.hidden = !shown;
  document.body.classList.toggle('inspecting', Boolean(shown));
  if (!shown) return;
  document.querySelectorAll('a[href]').forEach(each => each.getAttribute('href') === location.hash && each.classList.add('chosen'));
  inspector.replaceChildren(element('button', { type: 'button', class: 'close', 'aria-label': 'Close details', onclick: close }, '×'), ...shown);
  inspector.scrollTop = 0;
  inspector.focus({ preventScroll: true });
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return ''; }
}

function close() {
  history.replaceState(null, '', location.pathname + location.search);
  follow();
}

function facts(pairs) {
  return element('dl', { class: 'facts' }, pairs.filter(([, value]) => value !== '' && value !== null && value !== undefined)
    .flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]));
}

function heading(kind, name, ...beside) {
  return element('h2', {}, element('small', {}, kind), name, ...beside);
}

function inTree(module, name) {
  return element('button', { type: 'button', class: 'show', onclick: () => reveal(module, name) }, 'Show in the model');
}

// Why.

// For each axis the way from the annotation to the value.
function why(name) {
  const found = report.why[name] || [], seen = new Set(), made = [];
  for (const result of found) {
    for (const [axis, at] of Object.entries(result)) {
      if (seen.has(`${axis} ${at}`)) continue;
      seen.add(`${axis} ${at}`);
      made.push(chain(axis, at));
    }
  }
  return made;
}

function chain(axis, at) {
  const way = [];
  const end = report.annotations[report.origins[at][0]];
  for (let here = at; here >= 0; here = report.origins[here][3]) way.unshift(report.origins[here]);
  const [first, ...rest] = way.map(wayStep);
  const hidden = rest.length > 5 ? rest.splice(0, rest.length - 4) : [];
  const fold = hidden.length ? element('li', { class: 'fold' }, element('details', {}, element('summary', {}, `${hidden.length} steps`), element('ol', { class: 'plain chain' }, hidden))) : null;
  return element('div', { class: 'why' }, element('p', {}, axisTag(axis), ' comes from ', link('annotation', end, annotationText(end))), element('ol', { class: 'plain chain' }, first, fold, rest));
}

function wayStep([, name, via]) {
  const value = values.get(name), call = values.get(via);
  const place = call ? [call.module, call.source].filter(Boolean).join(', ') : '';
  return element('li', {}, value ? [toValue(name), ' ', typeText(value.type)] : name,
    via ? element('small', {}, ` by ${call ? call.op : via}${place ? ` · ${place}` : ''}`) : element('small', {}, ' annotated'));
}

function reasons(names) {
  const found = names.flatMap(why);
  return [element('h3', {}, 'Why'), ...(found.length ? found : [element('p', { class: 'hint' }, 'default: replicated. No annotation reaches it.')])];
}

// Things.

function showCollective(id) {
  const each = collectives.get(id);
  if (!each) return null;
  const [said, ends] = saidOf(each.cause), moved = each.node.split(', ').filter(name => values.has(name));
  const size = each.axes.reduce((product, part) => product * (Number((/:\(\d+\)(\d+)/.exec(part) || [])[1]) || axes[part] || 1), 1);
  return [heading(each.kind, each.id), element('p', {}, axisTags(each.axes), ` ${each.phase}, groups of ${counted(size, 'rank')}`),
    element('p', { class: 'figure' }, element('b', {}, bytes(each.wire_bytes)), ` sent by a rank${each.count > 1 ? `, ${each.count} times` : ''}`),
    element('h3', {}, 'What was there, what was wanted'), element('ul', { class: 'plain said' }, said.map(sentence => element('li', {}, rich(sentence)))),
    facts([['in', code(`${each.dtype}${shapeText(each.local_shape_in)}`)], ['out', code(`${each.dtype}${shapeText(each.local_shape_out)}`)],
      ['bytes', grouped(each.bytes)], ['wire bytes', grouped(each.wire_bytes)], ['stage', each.stage ?? ''], ['source', each.source],
      ['of', element('span', {}, moved.slice(0, 12).flatMap((name, i) => [i ? ', ' : '', toValue(name)]), moved.length > 12 ? ` and ${moved.length - 12} more` : '')],
      ['module', each.at && each.at.module ? link('module', each.at.module) : '']]),
    ...reasons(moved.length ? moved.slice(0, 3) : [each.at && each.at.name].filter(Boolean)), ends.length ? element('p', { class: 'hint' }, ends.join('; ')) : '',
    each.at && values.has(each.at.name) ? inTree(each.at.module, each.at.name) : ''];
}

// The sentences of a cause, and the annotations that it names at its end.
function saidOf(cause) {
  const parts = cause.split('; '), isEnd = part => /^\w+ from /.test(part);
  return [parts.filter(part => !isEnd(part)), parts.filter(isEnd)];
}

// A sentence with its values and types marked.
function rich(sentence) {
  return sentence.split(/((?:\b[a-z]+\d*)\[[^\]]*\](?:\{[^}]*\})*)/).map((piece, i) => (i % 2 ? typeText(piece) : piece.split(/([\w.]+)/).map(word => (values.has(word) && !values.get(word).given ? link('value', word) : word))));
}

function code(text) {
  return element('code', { class: 'type' }, text);
}

function edgeList(title, names) {
  if (!names.length) return '';
  const most = 24;
  return [element('h3', {}, title), element('ul', { class: 'plain edge-list' }, names.slice(0, most).map(name => element('li', {}, toValue(name), ' ', typeText(values.get(name).type))),
    names.length > most ? element('li', { class: 'hint' }, `and ${names.length - most} more`) : '')];
}

function showValue(name) {
  const value = values.get(name);
  if (!value) return null;
  const placed = report.pins.filter(pin => pin.name === called(value) && pin.kind === (value.given ? value.given.kind : 'value'));
  return [heading(value.given ? value.given.kind : value.op, called(value)), element('p', {}, typeText(value.type)),
    report.calls[name] ? element('pre', {}, report.calls[name]) : '',
    value.sends.map(each => element('p', {}, link('collective', each.id, sentMarks([each])))),
    facts([['phase', value.phase], ['module', value.module ? link('module', value.module) : ''], ['source', value.source], ['annotated', placed.map(pin => link('annotation', pin.text, annotationText(pin.text)))[0]],
      ['stage', (value.runs || []).map(run => `${run.stage} ${(run.part || '').replace('_', ' ')}`).join(', ')]]),
    ...reasons([name]), edgeList('Takes', value.operands), edgeList('Goes to', value.users), value.home ? inTree(value.module, name) : ''];
}

function showParameter(name) {
  const entry = stored.get(name);
  if (!entry) return null;
  const value = values.get(entry.node), owner = ownerOf(name);
  const placed = report.pins.find(pin => pin.name === name && pin.kind === entry.kind);
  const sums = [...collectives.values()].filter(each => `${each.cause}; `.includes(`the gradient ${name} wants`));
  return [heading(entry.kind, name), element('p', {}, typeText(entry.sharding)), largePicture(entry),
    facts([['on a rank', `${shapeText(entry.local_shape)}, ${bytes(entry.bytes)}`], ['whole', `${shapeText(entry.shape)}, ${bytes(entry.whole_bytes)}`],
      ['annotated', placed ? link('annotation', placed.text, annotationText(placed.text)) : ''], ['module', owner ? link('module', owner) : ''], ['stages', (entry.stages || []).join(', ')],
      ['gradient sent in', sums.length ? sums.map(each => link('collective', each.id)) : '']]),
    ...reasons([entry.node]), edgeList('Goes to', value.users)];
}

function showModule(path) {
  const module = modules.get(path);
  if (!module) return null;
  const { taken, given } = edges(module), sent = ['forward', 'backward', 'update'].flatMap(phase => module.sent[phase]);
  return [heading('module', path || report.model), element('p', {}, `${counted(module.values, 'op')}${module.bytes ? `, ${bytes(module.bytes)} of parameters on a rank` : ''}`),
    edgeList('Forward takes', taken), edgeList('Forward gives', given),
    element('h3', {}, 'Sends'), sent.length ? element('ul', { class: 'plain edge-list' }, sent.slice(0, 60).map(each => element('li', {}, link('collective', each.id, sentMarks([each])), ` ${each.phase}`))) : element('p', { class: 'hint' }, 'Nothing.'),
    ...reasons(given.slice(-1)), inTree(path, '')];
}

function showAnnotation(text) {
  const pins = report.pins.filter(pin => pin.text === text), at = report.annotations.indexOf(text);
  if (!pins.length && at < 0) return null;
  const reached = Object.entries(report.why).filter(([, found]) => found.some(result => Object.values(result).some(origin => report.origins[origin][0] === at))).map(([name]) => name);
  const named = pins.map(pin => (stored.has(pin.name) ? link('parameter', pin.name) : element('span', {}, `${pin.kind} ${pin.name}`)));
  return [heading('annotation', annotationText(text)), element('p', {}, `It reaches ${counted(reached.length, 'value')}.`),
    element('h3', {}, 'It is about'), element('ul', { class: 'plain edge-list' }, named.map(each => element('li', {}, each))), edgeList('It reaches', reached)];
}
