// Draws a generated dashboard without a Grafana server: a preview, no proof of what Grafana draws.

import 'uplot/dist/uPlot.min.css';

import * as React from 'react';
import { createRoot } from 'react-dom/client';

import { createTheme, DataFrame, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles, PanelChrome } from '@grafana/ui';

import { Body, Panel } from './bodies';
import { framesOf } from './prometheus';
import { readSettings, Settings } from './settings';
import { transformed } from './transformations';

const COLUMN_WIDTH = 66;
const ROW_HEIGHT = 38; // Grafana's: 30 and 8 between
const GAP = 8;
const HEADING_HEIGHT = 68;
const theme = createTheme({ colors: { mode: 'dark' } });

interface Dashboard {
  title: string;
  description: string;
  panels: Panel[];
}

/** Shows the error of a panel in its place, and lets the others be drawn. */
class Guard extends React.Component<{ children: React.ReactNode }, { error?: Error }> {
  state: { error?: Error } = {};

  static getDerivedStateFromError(error: Error) {
    return { error };
  }

  render() {
    return this.state.error ? <Failure text={String(this.state.error)} /> : this.props.children;
  }
}

function Failure({ text }: { text: string }) {
  return <pre style={{ color: '#ff7383', whiteSpace: 'pre-wrap', fontSize: 11 }}>{text}</pre>;
}

function Filled({
  panel,
  settings,
  width,
  height,
}: {
  panel: Panel;
  settings: Settings;
  width: number;
  height: number;
}) {
  const [frames, setFrames] = React.useState<DataFrame[]>();
  const [error, setError] = React.useState('');
  React.useEffect(() => {
    const targets = panel.targets ?? [];
    Promise.all(targets.map((target) => framesOf(target, settings, targets.length === 1)))
      .then((answers) => transformed(answers.flat(), panel.transformations))
      .then(setFrames)
      .catch((failure) => setError(String(failure)));
  }, []);
  if (error) {
    return <Failure text={error} />;
  }
  if (!frames) {
    return <i data-waiting />;
  }
  return (
    <Body
      panel={panel}
      frames={frames}
      settings={settings}
      theme={theme}
      width={width}
      height={height}
    />
  );
}

function Placed({ panel, settings }: { panel: Panel; settings: Settings }) {
  const { x, y, w, h } = panel.gridPos;
  const place = {
    position: 'absolute' as const,
    left: x * COLUMN_WIDTH + GAP,
    top: y * ROW_HEIGHT,
  };
  if (panel.type === 'row') {
    return (
      <div style={{ ...place, color: '#ccccdc', fontSize: 16, paddingTop: 10 }}>
        {panel.collapsed ? `\u203a ${panel.title} (${panel.panels!.length} panels)` : panel.title}
      </div>
    );
  }
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={w * COLUMN_WIDTH - GAP} height={h * ROW_HEIGHT - GAP}>
        {(width: number, height: number) => (
          <Guard>
            <Filled panel={panel} settings={settings} width={width} height={height} />
          </Guard>
        )}
      </PanelChrome>
    </div>
  );
}

function Page({ dashboard, settings }: { dashboard: Dashboard; settings: Settings }) {
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ padding: GAP, height: HEADING_HEIGHT - GAP, color: '#ccccdc' }}>
        <div style={{ fontSize: 20 }}>
          {dashboard.title}
          <span style={{ float: 'right', fontSize: 12, color: '#8e8e99' }}>{settings.label}</span>
        </div>
        <div style={{ fontSize: 13, color: '#8e8e99' }}>{dashboard.description}</div>
      </div>
      <div
        style={{
          position: 'relative',
          width: 24 * COLUMN_WIDTH + GAP,
          height: bottom * ROW_HEIGHT + GAP,
        }}
      >
        {dashboard.panels.map((panel) => (
          <Placed key={panel.id} panel={panel} settings={settings} />
        ))}
      </div>
    </ThemeContext.Provider>
  );
}

async function main() {
  await initPluginTranslations('zerowatch');
  const settings = await readSettings();
  const dashboard: Dashboard = await (await fetch(settings.dashboard)).json();
  createRoot(document.getElementById('dashboard')!).render(<Page dashboard={dashboard} settings={settings} />);
}

main();
