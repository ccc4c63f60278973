// Panels that Grafana does not publish as packages, drawn by us: a likeness, no copy.

import * as React from 'react';

import {
  DataFrame,
  Field,
  FieldDisplay,
  FieldType,
  getValueFormat,
  GrafanaTheme2,
} from '@grafana/data';

import { shownName } from './fields';

const TEXT = '#ccccdc';
const AXIS_WIDTH = 64;
const AXIS_HEIGHT = 20;

interface Size {
  width: number;
  height: number;
}

function valuesOf(frame: DataFrame): Field {
  return frame.fields.find((field) => field.type === FieldType.number)!;
}

/** A gauge: an arc from minimum to maximum, filled as far as the value goes. */
export function Dial({
  shown,
  theme,
  width,
  height,
}: Size & { shown: FieldDisplay; theme: GrafanaTheme2 }) {
  const { display, field } = shown;
  const radius = Math.min(width / 2, height / 1.6) * 0.8;
  const [x, y] = [width / 2, height / 2 + radius / 3];
  const [min, max] = [field.min ?? 0, field.max ?? 1];
  const share = Math.min(1, Math.max(0, (display.numeric - min) / (max - min)));
  return (
    <svg width={width} height={height}>
      <path
        d={arc(x, y, radius, 1)}
        stroke={theme.colors.background.secondary}
        strokeWidth={radius / 3}
        fill="none"
      />
      <path
        d={arc(x, y, radius, share)}
        stroke={display.color}
        strokeWidth={radius / 3}
        fill="none"
      />
      <text x={x} y={y} fill={display.color} fontSize={radius / 2} textAnchor="middle">
        {display.text + (display.suffix ?? '')}
      </text>
    </svg>
  );
}

/** An arc over the upper side, of 240 degrees times `share`. */
function arc(x: number, y: number, radius: number, share: number): string {
  const [start, sweep] = [(-210 * Math.PI) / 180, (240 * Math.PI) / 180];
  const end = start + sweep * Math.max(share, 0.001);
  const at = (angle: number) => `${x + radius * Math.cos(angle)} ${y + radius * Math.sin(angle)}`;
  const isLong = sweep * share > Math.PI ? 1 : 0;
  return `M ${at(start)} A ${radius} ${radius} 0 ${isLong} 1 ${at(end)}`;
}

/** A heatmap of a histogram's buckets, each the rate over the bucket below it. */
export function Heat({
  frames,
  unit,
  width,
  height,
}: Size & { frames: DataFrame[]; unit: string }) {
  const rows = bucketRows(frames);
  const most = Math.max(1e-9, ...rows.flatMap((row) => row.counts));
  const cellHeight = (height - AXIS_HEIGHT) / rows.length;
  const cellWidth = (width - AXIS_WIDTH) / (rows[0]?.counts.length ?? 1);
  const format = getValueFormat(unit);
  return (
    <svg width={width} height={height}>
      {rows.map(({ bound, counts }, index) => {
        const top = height - AXIS_HEIGHT - (index + 1) * cellHeight;
        const { text, suffix } = Number.isFinite(bound)
          ? format(bound)
          : { text: '+Inf', suffix: '' };
        return (
          <g key={bound}>
            <text x={4} y={top + cellHeight / 2 + 4} fill={TEXT} fontSize={11}>
              {text + (suffix ?? '')}
            </text>
            {counts.map((count, column) =>
              count > 1e-9 ? (
                <rect
                  key={column}
                  x={AXIS_WIDTH + column * cellWidth}
                  y={top + 0.5}
                  width={cellWidth + 0.2}
                  height={cellHeight - 1}
                  fill={orange(Math.sqrt(count / most))}
                />
              ) : null
            )}
          </g>
        );
      })}
    </svg>
  );
}

function bucketRows(frames: DataFrame[]) {
  const bound = (frame: DataFrame) =>
    Number(valuesOf(frame).labels!.le.replace('+Inf', 'Infinity'));
  const sorted = [...frames].sort((one, other) => bound(one) - bound(other));
  return sorted.map((frame, index) => {
    const below = index ? valuesOf(sorted[index - 1]).values : [];
    const counts = [...valuesOf(frame).values].map((value, column) =>
      Math.max(0, (value ?? 0) - (below[column] ?? 0))
    );
    return { bound: bound(frame), counts };
  });
}

const ROW_NAMES_WIDTH = 150;
const ROW_NAME_HEIGHT = 14;

/** A heatmap of series: a row of cells for each, colored by its value. */
export function Rows({
  frames,
  options,
  width,
  height,
}: Size & { frames: DataFrame[]; options: Record<string, any> }) {
  const fields = frames.map(valuesOf);
  const values = fields.flatMap((field) => [...field.values]).filter(Number.isFinite);
  const min = options.color.min ?? Math.min(...values);
  const max = options.color.max ?? Math.max(...values);
  const rowHeight = Math.min(40, (height - AXIS_HEIGHT) / fields.length);
  const cellWidth = (width - ROW_NAMES_WIDTH) / (fields[0]?.values.length ?? 1);
  const format = getValueFormat(options.cellValues.unit);
  const named = ({ text, suffix }: { text: string; suffix?: string }) => text + (suffix ?? '');
  const everyName = Math.ceil(ROW_NAME_HEIGHT / rowHeight);
  const color = (value: number) => {
    const strength = (value - min) / (max - min || 1);
    return orange(options.color.reverse ? 1 - strength : strength);
  };
  return (
    <svg width={width} height={height}>
      {fields.map((field, index) => (
        <g key={index}>
          {index % everyName === 0 && (
            <text x={4} y={(index + 0.5) * rowHeight + 4} fill={TEXT} fontSize={11}>
              {field.config.displayNameFromDS}
            </text>
          )}
          {[...field.values].map((value, column) =>
            Number.isFinite(value) ? (
              <rect
                key={column}
                x={ROW_NAMES_WIDTH + column * cellWidth}
                y={index * rowHeight}
                width={cellWidth + 0.2}
                height={rowHeight}
                fill={color(value)}
              />
            ) : null
          )}
        </g>
      ))}
      <text x={ROW_NAMES_WIDTH} y={height - 4} fill={TEXT} fontSize={11}>
        {`${named(format(min))} to ${named(format(max))}`}
      </text>
    </svg>
  );
}

/** An XY chart: curves through the points of each series, without axes of time. */
export function Curves({
  frames,
  options,
  theme,
  width,
  height,
}: Size & { frames: DataFrame[]; options: Record<string, any>; theme: GrafanaTheme2 }) {
  const field = (frame: DataFrame | undefined, name: string) =>
    frame?.fields.find((one) => shownName(one) === name);
  const curves = options.series.flatMap((series: any) => {
    const frame = frames[series.frame.matcher.options];
    const x = field(frame, series.x.matcher.options);
    const y = field(frame, series.y.matcher.options);
    if (!x || !y) {
      return [];
    }
    const known = [...x.values.keys()].filter((at) => x.values[at] !== null && y.values[at] !== null);
    const of = (one: Field) => known.map((at) => one.values[at]);
    return [{ name: series.name.fixed, xs: of(x), ys: of(y), y }];
  });
  const ends = (all: number[]) => [Math.min(...all), Math.max(...all)];
  const [left, right] = ends(curves.flatMap((curve: any) => curve.xs));
  const [low, high] = ends(curves.flatMap((curve: any) => curve.ys));
  const across = (x: number) =>
    AXIS_WIDTH + ((x - left) / (right - left || 1)) * (width - AXIS_WIDTH - 8);
  const up = (y: number) =>
    8 + (1 - (y - low) / (high - low || 1)) * (height - 2 * AXIS_HEIGHT - 8);
  const shown = (value: number) => {
    const { text, suffix } = curves[0].y.display!(value);
    return text + (suffix ?? '');
  };
  if (!curves.length) {
    return <div style={{ color: '#8e8e99', textAlign: 'center' }}>No data</div>;
  }
  return (
    <svg width={width} height={height}>
      {curves.map((curve: any, index: number) => (
        <g key={curve.name}>
          <polyline
            points={curve.xs.map((x: number, at: number) => `${across(x)},${up(curve.ys[at])}`).join(' ')}
            stroke={theme.visualization.getColorByName(curve.y.config.color.fixedColor)}
            fill="none"
          />
          <text
            x={AXIS_WIDTH + 40 * index}
            y={height - 4}
            fill={theme.visualization.getColorByName(curve.y.config.color.fixedColor)}
            fontSize={12}
          >
            {curve.name}
          </text>
        </g>
      ))}
      {[low, high].map((value) => (
        <text key={value} x={4} y={up(value) + 4} fill={TEXT} fontSize={11}>
          {shown(value)}
        </text>
      ))}
      {[left, right].map((value, index) => (
        <text
          key={index}
          x={across(value)}
          y={height - AXIS_HEIGHT}
          fill={TEXT}
          fontSize={11}
          textAnchor={index ? 'end' : 'start'}
        >
          {Math.round(value)}
        </text>
      ))}
    </svg>
  );
}

function orange(strength: number): string {
  return `hsl(${35 - 20 * strength}, 90%, ${15 + 45 * strength}%)`;
}

/** A state timeline: a band for each series, in the color of each value. */
export function States({
  frames,
  theme,
  height,
}: {
  frames: DataFrame[];
  theme: GrafanaTheme2;
  height: number;
}) {
  const band = Math.min(34, height / frames.length);
  return (
    <div>
      {frames.map((frame, index) => {
        const field = valuesOf(frame);
        return (
          <div key={index} style={{ display: 'flex', height: band - 4, marginBottom: 4 }}>
            <span style={{ width: 90, fontSize: 12, color: TEXT }}>
              {field.config.displayNameFromDS}
            </span>
            {[...field.values].map((value, column) => (
              <span key={column} style={{ flex: 1, background: stateColor(field, value, theme) }} />
            ))}
          </div>
        );
      })}
    </div>
  );
}

function stateColor(field: Field, value: number | null, theme: GrafanaTheme2): string {
  return value === null
    ? theme.colors.background.canvas
    : (field.display!(value).color ?? 'transparent');
}
