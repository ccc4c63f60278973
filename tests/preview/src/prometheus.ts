// Asks Prometheus what a panel's queries ask, and makes data frames of the answers.

import { DataFrame, FieldType, toDataFrame } from '@grafana/data';

import { Settings } from './settings';

interface Series {
  metric: Record<string, string>;
  value?: [number, string];
  values?: Array<[number, string]>;
}

export interface Target {
  expr: string;
  format: 'time_series' | 'heatmap' | 'table';
  instant: boolean;
  legendFormat: string;
  refId: string;
}

/**
 * Returns a frame for each series; of a table's query one frame with a line for each series.
 *
 * The values of a table's query are named after it if the table has several.
 */
export async function framesOf(
  target: Target,
  settings: Settings,
  isOnlyQuery: boolean
): Promise<DataFrame[]> {
  const series = await ask(target, settings);
  if (target.format === 'table') {
    return [tableFrame(target, series, isOnlyQuery ? 'Value' : `Value #${target.refId}`)];
  }
  return series.map((one) => seriesFrame(target, one, settings));
}

async function ask(target: Target, settings: Settings): Promise<Series[]> {
  const query = withValues(target.expr, settings);
  const path = target.instant ? 'query' : 'query_range';
  const when: Record<string, string> = target.instant
    ? { time: String(settings.to) }
    : {
        start: String(settings.from),
        end: String(settings.to),
        step: String(settings.step),
      };
  const parameters = new URLSearchParams({ query, ...when });
  const answer = await (await fetch(`${settings.prometheus}/api/v1/${path}?${parameters}`)).json();
  if (answer.status !== 'success') {
    throw new Error(`${answer.error} in ${query}`);
  }
  return answer.data.result;
}

/** Puts patterns in place of variables: all ranks, and all jobs. */
function withValues(expression: string, settings: Settings): string {
  const range = `${Math.max(1, Math.round(settings.to - settings.from))}s`;
  return expression
    .replaceAll('$__rate_interval', settings.window)
    .replaceAll('$__interval', `${settings.step}s`)
    .replaceAll('$__range', range)
    .replace(/="\$(\w+)"/g, '=~"$$$1"')
    .replace(/\$run\b/g, settings.run)
    .replace(/\$run_a\b|\$\{run_a:regex\}/g, settings.run_a)
    .replace(/\$run_b\b|\$\{run_b:regex\}/g, settings.run_b)
    .replace(/\$\{?\w+\}?/g, '.*');
}

function seriesFrame(target: Target, series: Series, settings: Settings): DataFrame {
  const points = series.values ?? [series.value!];
  const known = new Map(points.map(([time, value]) => [time, Number(value)]));
  const times = target.instant ? points.map(([time]) => time) : everyStep(settings);
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: times.map((time) => time * 1000) },
      {
        name: 'Value',
        type: FieldType.number,
        labels: series.metric,
        config: { displayNameFromDS: legend(target, series) },
        values: times.map((time) => known.get(time) ?? null),
      },
    ],
  });
}

/** All frames have the same times, so that a gap in one is a gap when they are drawn together. */
function everyStep({ from, to, step }: Settings): number[] {
  const count = Math.floor((to - from) / step) + 1;
  return Array.from({ length: count }, (_, index) => from + index * step);
}

function tableFrame(target: Target, series: Series[], valueName: string): DataFrame {
  const names = [...new Set(series.flatMap((one) => Object.keys(one.metric)))];
  const labels = names.map((name) => ({
    name,
    type: FieldType.string,
    values: series.map((one) => one.metric[name] ?? ''),
  }));
  const values = series.map((one) => Number(one.value![1]));
  // All answers have the same time, by which Grafana joins the lines of several queries.
  const time = {
    name: 'Time',
    type: FieldType.time,
    values: series.map((one) => one.value![0] * 1000),
  };
  return toDataFrame({
    refId: target.refId,
    fields: [time, ...labels, { name: valueName, type: FieldType.number, values }],
  });
}

function legend(target: Target, series: Series): string {
  if (target.legendFormat === '__auto') {
    return JSON.stringify(series.metric);
  }
  return target.legendFormat.replace(/{{(\w+)}}/g, (_, label) => series.metric[label] ?? '');
}
