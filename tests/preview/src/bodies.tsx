// What is inside a panel, by its type: Grafana's published components, else our stand-ins.

import * as React from 'react';

import {
  DataFrame,
  dateTime,
  getFieldDisplayValues,
  GrafanaTheme2,
  renderMarkdown,
  TimeRange,
  VizOrientation,
} from '@grafana/data';
import { BarGauge, BigValue, Table, TimeSeries, VizRepeater } from '@grafana/ui';

import { configured, FieldSource, shownName } from './fields';
import { Target } from './prometheus';
import { Settings } from './settings';
import { Curves, Dial, Heat, Rows, States } from './stand_ins';

export interface Panel {
  id: number;
  type: string;
  title: string;
  gridPos: { x: number; y: number; w: number; h: number };
  fieldConfig: FieldSource;
  options: Record<string, any>;
  targets?: Target[];
  transformations?: Array<{ id: string; options: any }>;
  collapsed?: boolean; // of a heading
  panels?: Panel[]; // of a collapsed heading
}

export interface BodyProps {
  panel: Panel;
  frames: DataFrame[];
  settings: Settings;
  theme: GrafanaTheme2;
  width: number;
  height: number;
}

const WITHOUT_DATA = 'No data';

export function Body(props: BodyProps) {
  const { panel, frames, theme } = props;
  if (panel.type === 'text') {
    return <Words {...props} />;
  }
  if (frames.every((frame) => frame.length === 0)) {
    return <Empty text={panel.fieldConfig.defaults.noValue ?? WITHOUT_DATA} />;
  }
  const Draw = BODIES[panel.type];
  if (!Draw) {
    return <Empty text={`no component for ${panel.type}`} />;
  }
  return <Draw {...props} frames={configured(frames, panel.fieldConfig, theme)} />;
}

const BODIES: Record<string, React.ComponentType<BodyProps>> = {
  timeseries: Graph,
  stat: Stat,
  gauge: Gauge,
  bargauge: Bars,
  table: Lines,
  heatmap: ({ panel, frames, width, height }) =>
    panel.options.cellValues ? (
      <Rows frames={frames} options={panel.options} width={width} height={height} />
    ) : (
      <Heat frames={frames} unit={panel.options.yAxis.unit} width={width} height={height} />
    ),
  xychart: ({ panel, frames, theme, width, height }) => (
    <Curves
      frames={frames}
      options={panel.options}
      theme={theme}
      width={width}
      height={height}
    />
  ),
  'state-timeline': ({ frames, theme, height }) => (
    <States frames={frames} theme={theme} height={height} />
  ),
};

function Empty({ text }: { text: string }) {
  return <div style={{ color: '#8e8e99', textAlign: 'center', paddingTop: 24 }}>{text}</div>;
}

function Words({ panel }: BodyProps) {
  const html = { __html: renderMarkdown(panel.options.content) };
  return <div style={{ fontSize: 14 }} dangerouslySetInnerHTML={html} />;
}

function Graph({ panel, frames, settings, width, height }: BodyProps) {
  return (
    <TimeSeries
      frames={frames}
      timeRange={rangeOf(settings)}
      timeZone="utc"
      width={width}
      height={height}
      legend={panel.options.legend}
      options={panel.options}
    />
  );
}

function Stat(props: BodyProps) {
  const { panel, theme } = props;
  const { colorMode, graphMode, textMode } = panel.options;
  return (
    <Repeated {...props} orientation={VizOrientation.Auto} autoGrid>
      {({ value, width, height, count }) => (
        <BigValue
          value={value.display}
          sparkline={graphMode === 'area' ? value.sparkline : undefined}
          width={width}
          height={height}
          theme={theme}
          colorMode={colorMode}
          graphMode={graphMode}
          textMode={textMode}
          count={count}
        />
      )}
    </Repeated>
  );
}

function Gauge(props: BodyProps) {
  return (
    <Repeated {...props} orientation={VizOrientation.Auto}>
      {({ value, width, height }) => (
        <Dial shown={value} theme={props.theme} width={width} height={height} />
      )}
    </Repeated>
  );
}

function Bars(props: BodyProps) {
  const { panel, theme } = props;
  const { displayMode, maxVizHeight, minVizHeight } = panel.options;
  return (
    <Repeated
      {...props}
      orientation={VizOrientation.Horizontal}
      minVizHeight={minVizHeight}
      maxVizHeight={maxVizHeight}
    >
      {({ value, width, height, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex!)}
          width={width}
          height={height}
          theme={theme}
          displayMode={displayMode}
          orientation={VizOrientation.Horizontal}
          alignmentFactors={alignmentFactors}
          itemSpacing={8}
        />
      )}
    </Repeated>
  );
}

/** Draws one thing for each series. */
function Repeated(props: BodyProps & { orientation: VizOrientation } & Record<string, any>) {
  const { panel, frames, settings, theme, width, height, orientation, children, ...layout } = props;
  const shown = () =>
    getFieldDisplayValues({
      data: frames,
      fieldConfig: { defaults: {}, overrides: [] },
      reduceOptions: panel.options.reduceOptions,
      replaceVariables: (text: string) => text,
      theme,
      timeZone: 'utc',
      sparkline: panel.options.graphMode === 'area',
    } as any);
  return (
    <VizRepeater
      source={frames}
      getValues={shown}
      getAlignmentFactors={longestTexts}
      renderValue={children as any}
      renderCounter={1}
      orientation={orientation}
      width={width}
      height={height}
      {...layout}
    />
  );
}

/** Bars begin below each other: all are given the space of the longest name and value. */
function longestTexts(values: any[]) {
  const longest = (texts: string[]) =>
    texts.reduce((one, other) => (other.length > one.length ? other : one), '');
  return {
    title: longest(values.map((value) => value.display.title ?? '')),
    text: longest(values.map((value) => value.display.text)),
    suffix: longest(values.map((value) => value.display.suffix ?? '')),
  };
}

function Lines({ panel, frames, width, height }: BodyProps) {
  const [by] = panel.options.sortBy ?? [];
  const sorted = by ? sortedBy(frames[0], by.displayName, by.desc ? -1 : 1) : frames[0];
  return <Table data={sorted} width={width} height={height} initialSortBy={[]} />;
}

function sortedBy(frame: DataFrame, name: string, sign: number): DataFrame {
  const by = frame.fields.find((field) => shownName(field) === name);
  if (!by) {
    return frame;
  }
  const order = [...by.values.keys()].sort(
    (one, other) => sign * ((by.values[one] ?? -Infinity) - (by.values[other] ?? -Infinity))
  );
  const fields = frame.fields.map((field) => ({
    ...field,
    values: order.map((index) => field.values[index]),
  }));
  return { ...frame, fields };
}

function rangeOf({ from, to }: Settings): TimeRange {
  return {
    from: dateTime(from * 1000),
    to: dateTime(to * 1000),
    raw: { from: dateTime(from * 1000), to: dateTime(to * 1000) },
  };
}
