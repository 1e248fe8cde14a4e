'use strict';
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const lower = (text) => text.toLocaleLowerCase();
  const SHOWN = 25; // samples at a time

  // Tables: a click on a header sorts, numbers from the highest first, absent ones last.
  const keyOf = (cell) => {
    if (!cell.classList.contains('number')) return cell.textContent.trim();
    return cell.dataset.value ? Number(cell.dataset.value) : null;
  };
  const compare = (one, other, isUp) => {
    if (one === null || other === null) return (one === null) - (other === null);
    const found = typeof one === 'number' ? one - other : one.localeCompare(other, 'en', { numeric: true });
    return isUp ? found : -found;
  };
  // A third click brings back the order of the page; headings of categories are shown only there.
  const sortBy = (table, headers, column) => {
    const header = headers[column];
    const isNumber = header.classList.contains('number');
    const steps = isNumber ? ['none', 'descending', 'ascending'] : ['none', 'ascending', 'descending'];
    const next = steps[(steps.indexOf(header.getAttribute('aria-sort')) + 1) % steps.length];
    headers.forEach((each) => each.setAttribute('aria-sort', 'none'));
    header.setAttribute('aria-sort', next);
    for (const body of table.tBodies) {
      const rows = original.get(body);
      const hasHeadings = rows.some((row) => !row.classList.contains('bold'));
      rows.forEach((row) => { row.hidden = next !== 'none' && hasHeadings && row.classList.contains('bold'); });
      const keyed = rows.map((row) => [keyOf(row.cells[column]), row]);
      if (next !== 'none') keyed.sort((one, other) => compare(one[0], other[0], next === 'ascending'));
      body.append(...keyed.map(([, row]) => row));
    }
  };
  const original = new Map(all('table.sortable tbody').map((body) => [body, [...body.rows]]));
  for (const table of all('table.sortable')) {
    const headers = all('thead th:not(.plot)', table);
    headers.forEach((header, column) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.append(...header.childNodes);
      header.append(button);
      header.setAttribute('aria-sort', 'none');
      button.addEventListener('click', () => sortBy(table, headers, column));
    });
  }

  // Samples: those of a task and outcome that hold all words, a page at a time.
  const picker = document.querySelector('[data-samples]');
  picker.hidden = false;
  picker.addEventListener('submit', (event) => event.preventDefault());
  const samples = all('#sample-list > .sample');
  const [task, kind] = all('select', picker);
  const more = document.querySelector('.show-more');
  let limit = SHOWN;
  const pick = () => {
    const words = lower(picker.querySelector('input').value).split(/\s+/).filter(Boolean);
    let fitting = 0;
    for (const sample of samples) {
      const fits = (!task.value || sample.dataset.task === task.value)
        && (!kind.value || sample.dataset.kinds.split('|').includes(kind.value))
        && words.every((word) => lower(sample.textContent).includes(word));
      sample.hidden = !fits || fitting >= limit;
      fitting += fits;
    }
    more.hidden = fitting <= limit;
    picker.querySelector('[role=status]').textContent = `${Math.min(fitting, limit)} of ${fitting} items are shown`;
  };
  picker.addEventListener('input', () => { limit = SHOWN; pick(); });
  more.addEventListener('click', () => { limit += SHOWN; pick(); });
  pick();

  // Charts. Expressions are interpreted, since the page's policy allows no code that is made of text.
  const tip = document.getElementById('tip');
  const showTip = (handler, event, item, value) => {
    tip.hidden = !value;
    if (tip.hidden) return;
    tip.textContent = Object.entries(value).filter(([, text]) => text && text !== 'null')
      .map(([name, text]) => (name === 'name' || name === 'run' ? text : `${name} ${text}`)).join('\n');
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, window.innerWidth - width - 4))}px`;
    tip.style.top = `${event.clientY > height + 16 ? event.clientY - height - 12 : event.clientY + 16}px`;
  };
  const ink = 'var(--ink)';
  const quiet = 'var(--quiet)';
  const config = {
    background: 'transparent',
    font: 'system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif',
    aria: false,
    view: { stroke: null },
    range: { category: [0, 1, 2, 3, 4, 5, 6, 7].map((place) => `var(--s${place})`) },
    rule: { strokeWidth: 2, opacity: 1, color: ink },
    point: { size: 60, opacity: 1 },
    legend: { labelColor: ink, labelFontSize: 12, columns: 2 },
    axisY: { minExtent: 44 }, // so that panels below each other are aligned
    axis: {
      labelColor: quiet, titleColor: quiet, gridColor: 'var(--line)', domainColor: 'var(--line)',
      tickColor: 'var(--line)', labelFontSize: 12, titleFontSize: 12, titleFontWeight: 'normal',
    },
  };
  const refuse = () => Promise.reject(new Error('a report loads nothing'));
  const draw = async () => {
    const charts = JSON.parse(document.getElementById('page-data').textContent);
    for (const place of all('[data-chart]')) {
      await window.vegaEmbed(place, charts[Number(place.dataset.chart)], {
        mode: 'vega-lite', renderer: 'svg', ast: true, actions: false, defaultStyle: false, tooltip: showTip,
        config, loader: { load: refuse, sanitize: refuse, http: refuse, file: refuse },
      });
    }
    document.documentElement.dataset.charts = charts.length;
  };
  draw();
})();
