// What a dashboard may hold, by the types that Grafana publishes. "@grafana/schema" becomes the release checked.

import type {
  AnnotationQuery,
  Dashboard,
  FieldConfig,
  FieldConfigSource,
  Panel,
  RowPanel,
  VariableModel,
} from '@grafana/schema';
import type { Dataquery } from '@grafana/grafana-foundation-sdk/prometheus';

import type * as BarGauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as Gauge from '@grafana/schema/dist/esm/raw/composable/gauge/panelcfg/x/GaugePanelCfg_types.gen';
import type * as Heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as Stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as StateTimeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as Table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as Text from '@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen';
import type * as TimeSeries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as XYChart from '@grafana/schema/dist/esm/raw/composable/xychart/panelcfg/x/XYChartPanelCfg_types.gen';

// JSON has no enums: each becomes the union of its values.
type Json<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends Array<infer Item>
      ? Json<Item>[]
      : T extends object
        ? { [Key in keyof T]: Json<T[Key]> }
        : T;

// Grafana fills in what a panel leaves out.
type Partially<T> =
  T extends Array<infer Item>
    ? Partially<Item>[]
    : T extends object
      ? { [Key in keyof T]?: Partially<T[Key]> }
      : T;

type Query = Omit<Json<Dataquery>, '_implementsDataqueryVariant'>;

type Fields<Custom> = {
  defaults: Json<Omit<FieldConfig, 'custom'>> & { custom?: Partially<Json<Custom>> };
  overrides: Json<FieldConfigSource['overrides']>;
};

type PanelOf<Kind extends string, Options, Custom> = Json<
  Omit<Panel, 'fieldConfig' | 'options' | 'targets' | 'type'>
> & {
  type: Kind;
  options: Partially<Json<Options>>;
  fieldConfig: Fields<Custom>;
  targets?: Query[];
};

type NoCustom = Record<string, never>;

export type Panels = {
  bargauge: PanelOf<'bargauge', BarGauge.Options, NoCustom>;
  gauge: PanelOf<'gauge', Gauge.Options, NoCustom>;
  heatmap: PanelOf<'heatmap', Heatmap.Options, Heatmap.FieldConfig>;
  row: Json<Omit<RowPanel, 'panels'>> & { panels: [] };
  stat: PanelOf<'stat', Stat.Options, NoCustom>;
  'state-timeline': PanelOf<'state-timeline', StateTimeline.Options, StateTimeline.FieldConfig>;
  table: PanelOf<'table', Table.Options, Table.FieldConfig>;
  text: PanelOf<'text', Text.Options, NoCustom>;
  timeseries: PanelOf<'timeseries', TimeSeries.Options, TimeSeries.FieldConfig>;
  xychart: PanelOf<'xychart', XYChart.Options, XYChart.FieldConfig>;
};

export type Variable = Json<VariableModel> & { definition?: string };

// What Prometheus' data source reads of an annotation stands beside Grafana's own keys.
export type Annotation = Json<AnnotationQuery> & {
  expr?: string;
  step?: string;
  tagKeys?: string;
  textFormat?: string;
  titleFormat?: string;
};

export type Frame = Json<Omit<Dashboard, 'annotations' | 'panels' | 'templating'>>;
