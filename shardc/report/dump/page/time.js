// The predicted step of a rank: what it computes when, and what is sent beside it.

function predictedTime() {
  const { makespan, computing, collectives: sent } = report.lanes,
    { time } = data;
  const names = Object.keys(sent).sort(),
    height = ROW * (names.length + 1) + 26;
  const scale = (CHART - MARGIN - 8) / (makespan || 1);
  const made = svg('svg', {
    class: 'schedule',
    viewBox: `0 0 ${CHART} ${height}`,
    role: 'group',
    'aria-label': 'The predicted step',
  });
  made.append(svg('text', { class: 'lane plainly', x: MARGIN - 10, y: 21, 'text-anchor': 'end' }, 'compute'));
  computing.forEach(box => made.append(computed(box, scale)));
  names.forEach((name, i) => made.append(sentOver(name, sent[name], ROW * (i + 1), scale)));
  made.append(
    svg('text', { class: 'lane plainly', x: MARGIN, y: height - 8 }, '0'),
    svg('text', { class: 'lane plainly', x: CHART - 8, y: height - 8, 'text-anchor': 'end' }, seconds(makespan)),
  );
  const waited = total(time.collectives, each => each.waited);
  const words = [
    `${seconds(time.step)} a step, predicted: ${seconds(time.computing)} of forward and backward`,
    time.optimizer ? `, ${seconds(time.optimizer)} of the optimizer` : '',
    `; for ${seconds(waited)} a rank waits for what is sent.`,
  ];
  return section(
    'time',
    'Predicted time',
    words,
    element('div', { class: 'scroll', tabindex: '0', 'aria-label': 'The predicted step, a picture' }, made),
    timeTable(time),
  );
}

function computed([phase, start, length], scale) {
  const x = MARGIN + start * scale;
  return svg(
    'g',
    { class: `action ${{ forward: 'F', backward: 'B' }[phase] || ''}` },
    svg('title', {}, `${phase}: ${seconds(start)} to ${seconds(start + length)}`),
    svg('rect', { x, y: 4, width: Math.max(0.6, length * scale), height: ROW - 8 }),
    length * scale > 70 ? svg('text', { x: x + (length * scale) / 2, y: 21, 'text-anchor': 'middle' }, phase) : '',
  );
}

function sentOver(name, found, top, scale) {
  const boxes = found.map(([id, start, length]) =>
    svg(
      'a',
      { href: address('collective', id), class: 'mark', tabindex: '-1', 'aria-label': id },
      svg('title', {}, `${id}: ${seconds(start)} to ${seconds(start + length)}`),
      svg('rect', {
        class: 'stem',
        x: MARGIN + start * scale,
        y: top + 7,
        width: Math.max(1, length * scale),
        height: ROW - 14,
        rx: 1,
      }),
    ),
  );
  const axis = svg('text', { class: 'lane', x: MARGIN - 10, y: top + 21, 'text-anchor': 'end' }, name);
  return svg('g', { class: axisClass(name.split('+')[0]) }, axis, boxes);
}

function timeTable(time) {
  const columns = [
    { key: 'axes', title: 'over', value: each => each.axes, show: each => axisTags(each.axes.split('+')) },
    number('count', 'collectives', each => each.count),
    duration('seconds', 'they take'),
    duration('waited', 'a rank waits'),
  ];
  return time.collectives.length ? table('time', columns, time.collectives) : '';
}
