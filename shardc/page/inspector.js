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

// For each axis the way from the annotation to the value.
function why(name) {
  const found = origins.get(name) || [],
    seen = new Set(),
    made = [];
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
  const fold = hidden.length
    ? element(
        'li',
        { class: 'fold' },
        element(
          'details',
          {},
          element('summary', {}, `${hidden.length} steps`),
          element('ol', { class: 'plain chain' }, hidden),
        ),
      )
    : null;
  return element(
    'div',
    { class: 'why' },
    element('p', {}, axisTag(axis), ' comes from ', link('annotation', end, annotationText(end))),
    element('ol', { class: 'plain chain' }, first, fold, rest),
  );
}

function wayStep([, name, via]) {
  const value = values.get(name),
    call = values.get(via);
  const place = call ? [call.module, call.source].filter(Boolean).join(', ') : '';
  return element(
    'li',
    {},
    value ? [toValue(name), ' ', typeText(value.type)] : name,
    via
      ? element('small', {}, ` by ${call ? call.op : via}${place ? ` · ${place}` : ''}`)
      : element('small', {}, ' annotated'),
  );
}

// Why what a collective moves may not stay as it is: who takes it, over which axis, and through which annotation.
const NEEDS = {
  sum: 'needs the sum itself',
  readers: 'is one of several that read it: it is reduced once for all of them',
  whole: 'needs this dim whole',
  fallback: 'has no rule, and runs whole on every rank',
  taken: 'has another of its dims cut by the axis',
  unfit: 'cannot be computed on pieces that are cut so',
  fewest: 'sends the fewest bytes this way, of all ways to compute it',
  placed: 'is annotated to lie so',
  end: 'lies as what it belongs to',
  cut: 'is cut by the axis',
};

function needs(id) {
  const groups = new Map();
  for (const [user, ...need] of report.needs[id] || []) {
    const key = JSON.stringify(need);
    groups.set(key, [...(groups.get(key) || []), user]);
  }
  return [...groups].map(([key, users]) => {
    const [axis, kind, dim, said, at] = JSON.parse(key);
    const more = users.length > 1 ? ` and ${users.length - 1} more` : '';
    const where = dim === null ? '' : `, dim ${dim}`;
    const sentence = [
      axisTag(axis),
      where,
      ': ',
      rich(users[0]),
      `${more} ${NEEDS[kind]}`,
      said ? ` (${said})` : '',
      '.',
    ];
    return element('div', { class: 'why' }, element('p', {}, sentence), at < 0 ? '' : chain(axis, at));
  });
}

function reasons(names, title = 'Why') {
  const found = names.flatMap(why);
  return [
    element('h3', {}, title),
    ...(found.length ? found : [element('p', { class: 'hint' }, 'default: replicated. No annotation reaches it.')]),
  ];
}
