// The same rules, alerts and dashboards for those who build their monitoring from mixins (monitoring.mixins.dev).
local groups(texts) = std.flattenArrays([std.parseYaml(text).groups for text in texts]);
{
  prometheusRules+:: {
    groups+: groups([
      importstr 'prometheus/rules/engine.yml',
      importstr 'prometheus/rules/gpu.yml',
      importstr 'prometheus/rules/hearth.yml',
      importstr 'prometheus/rules/host.yml',
      importstr 'prometheus/rules/limits.yml',
      importstr 'prometheus/rules/slo.yml',
    ]),
  },
  prometheusAlerts+:: {
    groups+: groups([
      importstr 'prometheus/alerts/gpu.yml',
      importstr 'prometheus/alerts/host.yml',
      importstr 'prometheus/alerts/load.yml',
      importstr 'prometheus/alerts/recovery.yml',
      importstr 'prometheus/alerts/serving.yml',
    ]),
  },
  grafanaDashboards+:: {
    'hearth-gpus.json': import 'grafana/dashboards/gpus.json',
    'hearth-recovery.json': import 'grafana/dashboards/recovery.json',
    'hearth-serving.json': import 'grafana/dashboards/serving.json',
  },
}
