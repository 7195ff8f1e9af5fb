// What is known of one thing: chosen by a link, shown beside the report, and named in the address.

const inspector = document.getElementById('inspector');
const SHOWN = new Map(
  Object.entries({
    value: showValue,
    collective: showCollective,
    parameter: showParameter,
    module: showModule,
    annotation: showAnnotation,
  }),
);

let before = null; // where the focus was when the inspector was opened

function follow() {
  const [, kind, name] = /^#(\w+):(.*)$/.exec(location.hash) || [];
  const shown = SHOWN.has(kind) && SHOWN.get(kind)(decoded(name));
  document.querySelectorAll('.chosen').forEach(each => each.classList.remove('chosen'));
  if (shown && inspector.hidden) before = document.activeElement;
  inspector.hidden = !shown;
  document.body.classList.toggle('inspecting', Boolean(shown));
  if (!shown) return;
  document
    .querySelectorAll('a[href]')
    .forEach(each => each.getAttribute('href') === location.hash && each.classList.add('chosen'));
  inspector.replaceChildren();
  fill(inspector, {}, [
    element('button', { type: 'button', class: 'close', 'aria-label': 'Close details', onclick: close }, '×'),
    shown,
  ]);
  inspector.scrollTop = 0;
  inspector.focus({ preventScroll: true });
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return '';
  }
}

function close() {
  history.replaceState(null, '', location.pathname + location.search);
  follow();
  if (before && before.isConnected) before.focus({ preventScroll: true });
}

function facts(pairs) {
  return element(
    'dl',
    { class: 'facts' },
    pairs
      .filter(([, value]) => value !== '' && value !== null && value !== undefined)
      .flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]),
  );
}

function heading(kind, name, ...beside) {
  return element('h2', {}, element('small', {}, kind), name, ...beside);
}

function inTree(module, name) {
  return element('button', { type: 'button', class: 'show', onclick: () => reveal(module, name) }, 'Show in the model');
}

// Why.

const ROLES = {
  made: 'made by',
  summed: 'summed by',
  passed: 'through',
  read: 'read by',
  wanted: 'wanted by',
  moved: 'moved by',
  repeated: 'made again by',
};

// For each axis the way from the annotation to the value.
function why(name) {
  return (chains.get(name) || []).map(([axis, at]) => chain(axis, at));
}

function chain(axis, at) {
  const way = [];
  for (let here = at; here >= 0; here = report.steps[here][5]) way.unshift(report.steps[here]);
  const [first, ...rest] = way.map(wayStep),
    end = report.annotations[way[0][0]];
  const hidden = rest.length > 5 ? rest.splice(0, rest.length - 4) : [];
  const fold = hidden.length
    ? element(
        'li',
        { class: 'fold' },
        folded(`${hidden.length} steps`, element('ol', { class: 'plain chain' }, hidden)),
      )
    : null;
  return element(
    'div',
    { class: 'why' },
    element('p', {}, axisTag(axis), ' comes from ', link('annotation', end, annotationText(end))),
    element('ol', { class: 'plain chain' }, first, fold, rest),
  );
}

function folded(title, ...children) {
  return element('details', {}, element('summary', {}, title), ...children);
}

function wayStep([, name, role, via, call]) {
  const value = byCalled.get(name),
    by = values.get(call);
  const place = by ? [by.module, by.source].filter(Boolean).join(', ') : '';
  const words = role === 'annotated' ? 'annotated' : role === 'tied' ? `since ${via} is cut so` : `${ROLES[role]} ${via}`;
  return element(
    'li',
    {},
    value ? [toValue(value.name), ' ', typeText(value.type)] : name,
    element('small', {}, ` ${words}${place && role !== 'annotated' ? ` · ${place}` : ''}`),
  );
}

function reasons(names) {
  const found = names.flatMap(why);
  return [
    element('h3', {}, 'Why'),
    ...(found.length ? found : [element('p', { class: 'hint' }, 'default: replicated. No annotation reaches it.')]),
  ];
}

// What is sent for one value: what it has, who wants it how, and why.
function partOf({ has, wants, reasons: sentences, chains: found }) {
  const end = (title, { name, type, module, location, operand, op }) => [
    element('dt', {}, title),
    element(
      'dd',
      {},
      rich(name),
      ' ',
      type ? typeText(type) : '',
      element(
        'small',
        {},
        [operand === null ? '' : `as operand ${operand} of ${op}`, module, location].filter(Boolean).join(' · '),
      ),
    ),
  ];
  return element(
    'div',
    { class: 'part' },
    element('dl', { class: 'facts ends' }, has ? end('has', has) : '', wants ? end('wants', wants) : ''),
    sentences.map(text => element('p', { class: 'reason' }, 'because ', rich(text))),
    found.map(([axis, at]) => chain(axis, at)),
  );
}

// What the compiler chose among, a list for each question.
function choices(found) {
  const questions = [...new Set(found.map(each => each.question))];
  return questions.map(question => [
    element('p', { class: 'hint' }, 'ways ', rich(question)),
    element(
      'ul',
      { class: 'plain choices' },
      found
        .filter(each => each.question === question)
        .map(each =>
          element(
            'li',
            { class: each.is_chosen ? 'fine' : '' },
            element('span', { class: 'sign' }, each.is_chosen ? '✓' : ''),
            element('span', {}, each.way, each.note ? element('small', {}, ` ${each.note}`) : ''),
            element('span', { class: 'amount' }, bytes(each.wire_bytes)),
          ),
        ),
    ),
  ]);
}
