{{/* Label app.kubernetes.io/name of the executors. */}}
{{- define "openapi-tool.chart" -}}
{{- .Values.nameOverride | default .Chart.Name -}}
{{- end -}}

{{- define "openapi-tool.name" -}}
{{- default (printf "%s-%s" .Release.Name (include "openapi-tool.chart" .)) .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of a further object; the argument is the root with "suffix". */}}
{{- define "openapi-tool.nameOf" -}}
{{- printf "%s-%s" (include "openapi-tool.name" . | trunc (int (sub 62 (len .suffix))) | trimSuffix "-") .suffix -}}
{{- end -}}

{{/* Name, labels and annotations of an object. The argument is a dict: "root", and optionally "name", "app" (the label
app.kubernetes.io/name), "labels" and "annotations". */}}
{{- define "openapi-tool.metadata" -}}
name: {{ .name | default (include "openapi-tool.name" .root) | quote }}
labels:
  {{- include "openapi-tool.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of a pod, with the same arguments. */}}
{{- define "openapi-tool.podMetadata" -}}
labels:
  {{- include "openapi-tool.labels" (dict "root" .root "app" .app "labels" .root.Values.podLabels) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.podAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.labels" -}}
{{- $own := dict
    "app.kubernetes.io/name" (.app | default (include "openapi-tool.chart" .root)) "app.kubernetes.io/instance" .root.Release.Name
    "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- merge $own (.labels | default dict) (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{- define "openapi-tool.selector" -}}
{{- include "openapi-tool.selectorOf" (dict "root" . "app" (include "openapi-tool.chart" .)) -}}
{{- end -}}

{{/* The same of another app; arguments "root" and "app". */}}
{{- define "openapi-tool.selectorOf" -}}
app.kubernetes.io/name: {{ .app | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- end -}}

{{/* Label app.kubernetes.io/name of the gateway's pods, and the name of its objects. */}}
{{- define "openapi-tool.gatewayApp" -}}
{{ include "openapi-tool.chart" . }}-gateway
{{- end -}}

{{- define "openapi-tool.gatewayName" -}}
{{- include "openapi-tool.nameOf" (merge (dict "suffix" "gateway") .) -}}
{{- end -}}

{{/* The Deployments that are rendered, as JSON: name, app, program. */}}
{{- define "openapi-tool.deployments" -}}
{{- $found := list -}}
{{- if .Values.serve.enabled -}}
{{- $found = append $found (dict "name" (include "openapi-tool.name" .) "app" (include "openapi-tool.chart" .) "program" "executor") -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
{{- $found = append $found (dict "name" (include "openapi-tool.gatewayName" .) "app" (include "openapi-tool.gatewayApp" .) "program" "gateway") -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Label app.kubernetes.io/name of pods that are not executors: the selectors must not match them. */}}
{{- define "openapi-tool.job" -}}
{{ include "openapi-tool.chart" . }}-job
{{- end -}}

{{- define "openapi-tool.serviceAccount" -}}
{{- with .Values.serviceAccount -}}
{{- .name | default (ternary (include "openapi-tool.name" $) "default" .create) -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.gatewayServiceAccount" -}}
{{- with .Values.gateway.serviceAccount -}}
{{- .name | default (ternary (include "openapi-tool.gatewayName" $) "default" .create) -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* 128 MiB for the process, its memory budgets plus a quarter for memory that the allocator cannot return, 1 MiB per
call, and per worker process 80 MiB and 20 bytes per byte of a response (`isolation/limits.py`). */}}
{{- define "openapi-tool.memoryBytes" -}}
{{- $config := .Values.config | default dict -}}
{{- $responses := dig "egress" "body_budget_bytes" 256000000 $config | int64 -}}
{{- $cache := dig "cache" "max_bytes" 4000000 $config | int64 -}}
{{- $calls := dig "executor" "concurrency" 64 $config | int64 -}}
{{- $workers := dig "isolation" "workers" 2 $config | int64 -}}
{{- $worker := add 83886080 (mul 20 (dig "egress" "max_response_bytes" 10000000 $config | int64)) -}}
{{- add (div (mul (add $responses $cache) 5) 4) (mul $calls 1048576) (mul $workers $worker) 134217728 -}}
{{- end -}}

{{/* For the gateway: also 64 MiB for its server, and a request's body of 1 MiB per connection. */}}
{{- define "openapi-tool.gatewayMemoryBytes" -}}
{{- $connections := dig "gateway" "max_connections" 1024 (.Values.config | default dict) | int64 -}}
{{- add (include "openapi-tool.memoryBytes" . | int64) 67108864 (mul $connections 1048576) -}}
{{- end -}}

{{/* Seconds that a pod needs to stop: it continues to fetch, then drains. */}}
{{- define "openapi-tool.stopSeconds" -}}
{{- add .Values.preStopSleepSeconds (.Values.config | default dict | dig "executor" "drain_timeout_s" 25.0 | float64 | ceil | int64) -}}
{{- end -}}

{{/* Adds 5 s, of which the last log lines may take one: the process ends after drain_timeout_s, whatever blocks. */}}
{{- define "openapi-tool.grace" -}}
{{- $stop := include "openapi-tool.stopSeconds" . | int64 -}}
{{- $grace := .Values.terminationGracePeriodSeconds | default (add $stop 5) | int64 -}}
{{- if lt $grace (add $stop 2) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but the end of a pod takes up to %d: preStopSleepSeconds + config.executor.drain_timeout_s + 2. Raise it, or do not set it." $grace (add $stop 2)) -}}
{{- end -}}
{{- $grace -}}
{{- end -}}

{{/* PromQL matchers of the pods of Deployments, which are called NAME-HASH-SUFFIX with a hash of up to 10 characters;
Kubernetes truncates everything before the suffix to 58. Arguments: "root", "names". */}}
{{- define "openapi-tool.matchers" -}}
{{- $patterns := list -}}
{{- range $name := .names -}}
{{- $pods := ternary "%s-[a-z0-9]+-[a-z0-9]+" "%s[a-z0-9-]+" (le (len $name) 46) -}}
{{- $patterns = append $patterns (printf $pods (gt (len $name) 46 | ternary (printf "%s-" $name | trunc 58) $name)) -}}
{{- end -}}
namespace="{{ .root.Release.Namespace }}",pod=~"{{ join "|" $patterns }}"
{{- end -}}

{{/* Dashboard that shows only this release, with its own uid and title. */}}
{{- define "openapi-tool.dashboard" -}}
{{- $names := list -}}
{{- range include "openapi-tool.deployments" . | fromJsonArray -}}{{- $names = append $names .name -}}{{- end -}}
{{- $matchers := include "openapi-tool.matchers" (dict "root" . "names" $names) | replace `"` `\"` -}}
{{- $dashboard := .Files.Get "files/dashboard.json" | replace `namespace=\"$namespace\"` $matchers | replace `,pod=~\".*openapi-tool.*\"` "" | fromJson -}}
{{- $release := printf "%s/%s" .Release.Namespace (include "openapi-tool.name" .) -}}
{{- $_ := set $dashboard "uid" (printf "openapi-tool-%s" (sha256sum $release | trunc 20)) -}}
{{- $_ := set $dashboard "title" (printf "openapi-tool (%s)" $release) -}}
{{- with .Values.monitoring.runbookUrl -}}
{{- $_ := set $dashboard "links" (list (dict "title" "Runbook" "type" "link" "url" . "targetBlank" true)) -}}
{{- end -}}
{{- $_ := set $dashboard.templating "list" (list (first $dashboard.templating.list)) -}}
{{- toPrettyJson $dashboard -}}
{{- end -}}

{{/* Port of a NATS URL. */}}
{{- define "openapi-tool.port" -}}
{{- $default := ternary 80 (ternary 443 4222 (hasPrefix "wss:" .)) (hasPrefix "ws:" .) -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" .) | default $default -}}
{{- end -}}

{{/* Half of the slots of a pod, so that another pod starts before all are used. */}}
{{- define "openapi-tool.lagThreshold" -}}
{{- max 1 (div (.Values.config | default dict | dig "executor" "concurrency" 64 | int64) 2) -}}
{{- end -}}

{{- define "openapi-tool.durable" -}}
{{- $config := .Values.config | default dict -}}
{{- $version := dig "protocol" "version" "v1r4" $config -}}
{{- $target := dig "protocol" "target" "jina" $config -}}
{{- dig "nats" "durable" (printf "tool_%s_openapi_cmd_%s" $target $version) $config -}}
{{- end -}}

{{/* Requests and limits that are set; the memory limit is computed if it is not. Arguments: "where" (the path of the
values), "resources", "memoryBytes". */}}
{{- define "openapi-tool.resources" -}}
{{- $found := dict -}}
{{- range $kind := list "requests" "limits" -}}
{{- $set := dict -}}
{{- range $name, $quantity := get $.resources $kind -}}
{{- if ne (toString ($quantity | default "")) "" -}}
{{- $_ := set $set $name (include "openapi-tool.quantity" $quantity) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $found $kind $set -}}
{{- end -}}
{{- $memory := printf "%dMi" (div (add (int64 .memoryBytes) 1048575) 1048576) -}}
{{- $_ := set $found "limits" (merge $found.limits (dict "memory" $memory)) -}}
{{- range $name, $request := $found.requests -}}
{{- $limit := get $found.limits $name -}}
{{- if and $limit (gt (include "openapi-tool.amount" $request | float64) (include "openapi-tool.amount" $limit | float64)) -}}
{{- fail (printf "%s: requests.%s (%s) is more than limits.%s (%s)." $.where $name $request $name $limit) -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* A quantity as text: a number would become 1e+09. */}}
{{- define "openapi-tool.quantity" -}}
{{- if kindIs "string" . -}}{{- . -}}
{{- else if eq (floor .) (float64 .) -}}{{- printf "%.0f" (float64 .) -}}
{{- else -}}{{- . -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.amount" -}}
{{- $factors := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15
    "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- mulf (float64 $number) (dig (trimPrefix $number .) 1 $factors | float64) -}}
{{- end -}}

{{- define "openapi-tool.strategy" -}}
{{- with .Values.strategy -}}
type: {{ .type }}
{{- if eq .type "RollingUpdate" }}
rollingUpdate:
  {{- toYaml .rollingUpdate | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Metrics of a HorizontalPodAutoscaler; the argument has "metrics" and "targetCPUUtilizationPercentage". */}}
{{- define "openapi-tool.hpaMetrics" -}}
{{- if .metrics -}}
{{- toYaml .metrics -}}
{{- else -}}
- type: Resource
  resource:
    name: cpu
    target:
      type: Utilization
      averageUtilization: {{ int .targetCPUUtilizationPercentage }}
{{- end -}}
{{- end -}}

{{/* TOML of an object at "path": plain keys first, then tables, since a key after a table's header would be the table's. */}}
{{- define "openapi-tool.toml" -}}
{{- $path := .path -}}
{{- range $key, $value := .object }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ include "openapi-tool.tomlKey" $key }} = {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ printf "%.0f" $value }}{{ else }}{{ toRawJson $value }}{{ end }}
{{- end }}
{{- end }}
{{- range $key, $value := .object }}
{{- if kindIs "map" $value }}
{{- $name := include "openapi-tool.tomlKey" $key }}
{{- $table := ternary (printf "%s.%s" $path $name) $name (ne $path "") }}

[{{ $table }}]
{{- include "openapi-tool.toml" (dict "object" $value "path" $table) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ toRawJson . }}{{- end -}}
{{- end -}}

{{/* Common parts of all pods. */}}
{{- define "openapi-tool.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Common parts of the pods of both Deployments; arguments "root" and "selector". */}}
{{- define "openapi-tool.places" -}}
{{- with .root.Values.affinity -}}
affinity:
  {{- toYaml . | nindent 2 }}
{{ end -}}
topologySpreadConstraints:
  {{- if .root.Values.topologySpreadConstraints }}
  {{- toYaml .root.Values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .selector | nindent 8 }}
  {{- end }}
terminationGracePeriodSeconds: {{ include "openapi-tool.grace" .root }}
{{- with .root.Values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Start and end of the containers of both Deployments. */}}
{{- define "openapi-tool.life" -}}
{{- if .Values.preStopSleepSeconds -}}
lifecycle:
  preStop:
    exec:
      command: ["sleep", {{ .Values.preStopSleepSeconds | toString | quote }}]
{{ end -}}
{{- range $probe, $path := dict "startup" "/livez" "liveness" "/livez" "readiness" "/readyz" -}}
{{ $probe }}Probe:
  httpGet:
    path: {{ $path }}
    port: health
  {{- toYaml (get $.Values.probes $probe) | nindent 2 }}
{{ end -}}
{{- end -}}

{{- define "openapi-tool.container" -}}
image: {{ include "openapi-tool.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .Values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.envFrom" -}}
{{- with .Values.envFrom -}}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* Variable whose value is in a Secret: arguments name, secret, key. */}}
{{- define "openapi-tool.secretEnv" }}
- name: {{ .variable | quote }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret | quote }}
      key: {{ .key | quote }}
{{- end -}}

{{/* The argument is the root, with "dsnSecret" if the connection string is in another Secret. */}}
{{- define "openapi-tool.postgresEnv" -}}
{{- with .Values.secrets.postgres }}
{{- include "openapi-tool.secretEnv" (dict "variable" "PG_DSN" "secret" (default .name $.dsnSecret) "key" .dsnKey) }}
{{- range $variable, $key := dict "PGSSLROOTCERT" .caKey "PGSSLCERT" .certKey "PGSSLKEY" .keyKey }}
{{- if $key }}
- name: {{ $variable }}
  value: /etc/openapi-tool/postgres/{{ $key }}
{{- end }}
{{- end }}
{{- $mode := false }}
{{- range $.Values.extraEnv }}{{ if eq .name "PGSSLMODE" }}{{ $mode = true }}{{ end }}{{ end }}
{{- if and .caKey (not $mode) }}
- name: PGSSLMODE
  value: verify-full
{{- end }}
{{- end }}
{{- end -}}

{{/* Login and TLS of a NATS; arguments: prefix of the variables, volume of the login's files, login, tls. */}}
{{- define "openapi-tool.natsEnv" }}
{{- if .login.userKey }}
{{- include "openapi-tool.secretEnv" (dict "variable" (print .prefix "USER") "secret" .login.name "key" .login.userKey) }}
{{- end }}
{{- range $setting, $key := dict "PASSWORD_FILE" .login.passwordKey "TOKEN_FILE" .login.tokenKey "CREDENTIALS_FILE" .login.credentialsKey "NKEY_SEED_FILE" .login.nkeySeedKey }}
{{- if $key }}
- name: {{ $.prefix }}{{ $setting }}
  value: /etc/openapi-tool/{{ $.volume }}/{{ $key }}
{{- end }}
{{- end }}
{{- if .tls.name }}
{{- range $setting, $key := dict "CA_FILE" .tls.caKey "CERT_FILE" .tls.certKey "KEY_FILE" .tls.keyKey }}
{{- if $key }}
- name: {{ $.prefix }}{{ $setting }}
  value: /etc/openapi-tool/{{ $.volume }}-tls/{{ $key }}
{{- end }}
{{- end }}
- name: {{ $.prefix }}TLS
  value: "true"
{{- end }}
{{- end -}}

{{- define "openapi-tool.settingsEnv" }}
- name: OPENAPI_TOOL_CONFIG
  value: /etc/openapi-tool/config/openapi-tool.toml
- name: OPENAPI_TOOL__HEALTH__HOST
  value: 0.0.0.0
- name: OPENAPI_TOOL__HEALTH__PORT
  value: "8080"
{{- with .Values.allowedEnv }}
- name: OPENAPI_TOOL__SECRETS__ALLOWED_ENV
  value: {{ join "," . | quote }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.env" -}}
- name: NATS_SERVERS
  value: {{ join "," .Values.nats.servers | quote }}
{{- include "openapi-tool.settingsEnv" . }}
{{- include "openapi-tool.postgresEnv" . }}
{{- include "openapi-tool.natsEnv" (dict "prefix" "OPENAPI_TOOL__NATS__" "volume" "nats" "login" .Values.secrets.nats "tls" .Values.secrets.natsTls) }}
{{- include "openapi-tool.quotasEnv" . }}
{{- include "openapi-tool.secretsEnv" . }}
{{- end -}}

{{- define "openapi-tool.gatewayEnv" -}}
- name: OPENAPI_TOOL__GATEWAY__HOST
  value: 0.0.0.0
- name: OPENAPI_TOOL__GATEWAY__PORT
  value: "8090"
{{- include "openapi-tool.settingsEnv" . }}
{{- with .Values.gateway }}
{{- if .tokens.name }}
- name: OPENAPI_TOOL__GATEWAY__TOKENS_FILE
  value: /etc/openapi-tool/gateway-tokens/{{ .tokens.key }}
{{- end }}
{{- if .ingress.enabled }}
- name: OPENAPI_TOOL__GATEWAY__ALLOWED_HOSTS
  value: {{ concat .ingress.hosts (dig "gateway" "allowed_hosts" (list) ($.Values.config | default dict)) | uniq | join "," | quote }}
{{- end }}
{{- if .nats.servers }}
- name: NATS_SERVERS
  value: {{ join "," .nats.servers | quote }}
{{- include "openapi-tool.natsEnv" (dict "prefix" "OPENAPI_TOOL__NATS__" "volume" "gateway-nats" "login" .nats "tls" .natsTls) }}
{{- include "openapi-tool.quotasEnv" $ }}
{{- else }}
- name: XDG_STATE_HOME
  value: /var/lib/openapi-tool
{{- end }}
{{- end }}
{{- include "openapi-tool.secretsEnv" . }}
{{- end -}}

{{- define "openapi-tool.quotasEnv" -}}
{{- with .Values.quotas }}
{{- if .nats.servers }}
- name: OPENAPI_TOOL__QUOTAS__NATS__SERVERS
  value: {{ join "," .nats.servers | quote }}
{{- include "openapi-tool.natsEnv" (dict "prefix" "OPENAPI_TOOL__QUOTAS__NATS__" "volume" "quotas-nats" "login" .nats "tls" .natsTls) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.secretsEnv" -}}
{{- with .Values.secrets }}
{{- if .session.name }}
{{- include "openapi-tool.secretEnv" (dict "variable" "OPENAPI_TOOL__SESSION__KEY" "secret" .session.name "key" .session.key) }}
{{- end }}
{{- if .proxy.name }}
{{- include "openapi-tool.secretEnv" (dict "variable" "OPENAPI_TOOL__EGRESS__PROXY" "secret" .proxy.name "key" .proxy.key) }}
{{- end }}
{{- if .upstreamCa.name }}
- name: OPENAPI_TOOL__EGRESS__CA_FILE
  value: /etc/openapi-tool/upstream-ca/{{ .upstreamCa.key }}
{{- end }}
{{- range include "openapi-tool.keys" $ | fromJsonArray }}
{{- if $.Values.secrets.keys.asFiles }}
- name: {{ . }}_FILE
  value: {{ printf "/etc/openapi-tool/keys/%s" . | quote }}
{{- else }}
{{- include "openapi-tool.secretEnv" (dict "variable" . "secret" $.Values.secrets.keys.name "key" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Variables with keys, as JSON. */}}
{{- define "openapi-tool.keys" -}}
{{- concat (list "JINA_API_KEY") (.Values.allowedEnv | default list) | uniq | toJson -}}
{{- end -}}

{{/* Secrets that the executor mounts. */}}
{{- define "openapi-tool.mounted" -}}
{{- omit (include "openapi-tool.allMounted" . | fromYaml) "gateway-nats" "gateway-nats-tls" "gateway-tokens" | toYaml -}}
{{- end -}}

{{/* Secrets that the gateway mounts. */}}
{{- define "openapi-tool.gatewayMounted" -}}
{{- $found := omit (include "openapi-tool.allMounted" . | fromYaml) "postgres" "nats" "nats-tls" -}}
{{- if not .Values.gateway.nats.servers -}}{{- $found = omit $found "quotas-nats" "quotas-nats-tls" -}}{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Mounted Secrets by the name of their volume; only the keys that are read. */}}
{{- define "openapi-tool.allMounted" -}}
{{- $secrets := .Values.secrets -}}
{{- $quotas := .Values.quotas -}}
{{- $gateway := .Values.gateway -}}
{{- $mounted := dict
  "postgres" (dict "name" $secrets.postgres.name "keys" (list $secrets.postgres.caKey $secrets.postgres.certKey $secrets.postgres.keyKey))
  "nats" (dict "name" $secrets.nats.name "keys" (list $secrets.nats.passwordKey $secrets.nats.tokenKey $secrets.nats.credentialsKey $secrets.nats.nkeySeedKey))
  "nats-tls" (dict "name" $secrets.natsTls.name "keys" (list $secrets.natsTls.caKey $secrets.natsTls.certKey $secrets.natsTls.keyKey))
  "quotas-nats" (dict "name" $quotas.nats.name "keys" (list $quotas.nats.passwordKey $quotas.nats.tokenKey $quotas.nats.credentialsKey $quotas.nats.nkeySeedKey))
  "quotas-nats-tls" (dict "name" $quotas.natsTls.name "keys" (list $quotas.natsTls.caKey $quotas.natsTls.certKey $quotas.natsTls.keyKey))
  "gateway-nats" (dict "name" $gateway.nats.name "keys" (list $gateway.nats.passwordKey $gateway.nats.tokenKey $gateway.nats.credentialsKey $gateway.nats.nkeySeedKey))
  "gateway-nats-tls" (dict "name" $gateway.natsTls.name "keys" (list $gateway.natsTls.caKey $gateway.natsTls.certKey $gateway.natsTls.keyKey))
  "gateway-tokens" (dict "name" $gateway.tokens.name "keys" (list $gateway.tokens.key))
  "upstream-ca" (dict "name" $secrets.upstreamCa.name "keys" (list $secrets.upstreamCa.key))
  "keys" (dict "name" (ternary $secrets.keys.name "" $secrets.keys.asFiles) "keys" (include "openapi-tool.keys" . | fromJsonArray)) -}}
{{- $found := dict -}}
{{- range $volume, $secret := $mounted -}}
{{- $keys := compact $secret.keys -}}
{{- if and $secret.name $keys -}}{{- $_ := set $found $volume (dict "name" $secret.name "keys" $keys) -}}{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Mounts of the settings and of Secrets; the argument is what "openapi-tool.mounted" returns, or a part of it. */}}
{{- define "openapi-tool.ownMounts" -}}
- name: config
  mountPath: /etc/openapi-tool/config
  readOnly: true
{{- range $volume, $_ := . }}
- name: {{ $volume }}
  mountPath: /etc/openapi-tool/{{ $volume }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* The volumes of these mounts; arguments "root" and "mounted". */}}
{{- define "openapi-tool.ownVolumes" -}}
- name: config
  configMap:
    name: {{ include "openapi-tool.name" .root | quote }}
{{- range $volume, $secret := .mounted }}
- name: {{ $volume }}
  secret:
    secretName: {{ $secret.name | quote }}
    # Readable by the group, because the container's user is not the owner.
    defaultMode: 0440
    items:
      {{- range $secret.keys }}
      - key: {{ . | quote }}
        path: {{ . | quote }}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.volumeMounts" -}}
{{- include "openapi-tool.mounted" . | fromYaml | include "openapi-tool.ownMounts" }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "openapi-tool.volumes" -}}
{{- include "openapi-tool.ownVolumes" (dict "root" . "mounted" (include "openapi-tool.mounted" . | fromYaml)) }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Spec of a pod that runs one command and exits. */}}
{{- define "openapi-tool.commandResources" -}}
requests:
  cpu: 50m
  memory: 128Mi
limits:
  memory: 256Mi
{{- end -}}

{{/* Checks that the schema cannot express, or not with a readable message. deployment.yaml includes them, so that every
render runs them. */}}
{{- define "openapi-tool.check" -}}
{{- include "openapi-tool.checkGateway" . -}}
{{- include "openapi-tool.checkNames" . -}}
{{- include "openapi-tool.checkServers" . -}}
{{- include "openapi-tool.checkQuotas" . -}}
{{- include "openapi-tool.checkVolumes" . -}}
{{- include "openapi-tool.checkTools" . -}}
{{- include "openapi-tool.checkConfig" . -}}
{{- range .Values.extraObjects -}}
{{- if eq .kind "Secret" -}}
{{- fail "extraObjects: a Secret would be stored in plain text in the values. Create it apart from the chart, or let an ExternalSecret or SealedSecret do it." -}}
{{- end -}}
{{- end -}}
{{- range concat (.Values.initContainers | default list) (.Values.extraContainers | default list) -}}
{{- if has .name (list "executor" "gateway") -}}
{{- fail (printf "initContainers, extraContainers: the name %s is taken. Choose another." .name) -}}
{{- end -}}
{{- end -}}
{{- range .Values.allowedEnv -}}
{{- if regexMatch "(?i)^(PG.*|NATS_.*|OPENAPI_TOOL.*|OTEL_.*|(CG_CONFIG_TOML|HTTPS?_PROXY|ALL_PROXY|NO_PROXY|SSL_CERT_FILE|SSL_CERT_DIR)(_FILE)?)$" . -}}
{{- fail (printf "allowedEnv: %s is one of the executor's own settings, which tools never get. Remove it." .) -}}
{{- end -}}
{{- end -}}
{{- range .Values.allowedEnv -}}
{{- if regexMatch "(?i)^(PATH|HOME|USER|SHELL|TZ|TMPDIR|HOSTNAME|LANG|LC_.*|LD_.*|PYTHON.*|MALLOC_.*|KUBERNETES_.*)$" . -}}
{{- fail (printf "allowedEnv: %s belongs to the process. Name a variable that holds a key, such as SEARCH_API_KEY." .) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "[\\x{7f}-\\x{9f}]" (toJson .Values) -}}
{{- fail "a value contains a control character (U+007F to U+009F), which YAML does not permit. Remove it." -}}
{{- end -}}
{{- $own := concat (.Values.allowedEnv | default list) (list
    "JINA_API_KEY" "PG_DSN" "NATS_SERVERS" "OPENAPI_TOOL_CONFIG" "OPENAPI_TOOL__HEALTH__HOST" "OPENAPI_TOOL__HEALTH__PORT"
    "OPENAPI_TOOL__POSTGRES__DSN" "OPENAPI_TOOL__NATS__PASSWORD" "OPENAPI_TOOL__NATS__TOKEN"
    "OPENAPI_TOOL__NATS__SERVERS" "OPENAPI_TOOL__NATS__USER" "OPENAPI_TOOL__NATS__CA_FILE" "OPENAPI_TOOL__NATS__CERT_FILE"
    "OPENAPI_TOOL__NATS__KEY_FILE" "OPENAPI_TOOL__NATS__CREDENTIALS_FILE" "OPENAPI_TOOL__NATS__NKEY_SEED_FILE"
    "OPENAPI_TOOL__EGRESS__CA_FILE" "JINA_API_KEY_FILE"
    "OPENAPI_TOOL__SESSION__KEY" "OPENAPI_TOOL__EGRESS__PROXY" "OPENAPI_TOOL__SECRETS__ALLOWED_ENV" "XDG_STATE_HOME") -}}
{{- range $place, $given := dict "config" .Values.config "toolsJob.definitions" .Values.toolsJob.definitions "gateway.tools" .Values.gateway.tools -}}
{{- if regexMatch "jina_[A-Za-z0-9]{20}" (toJson $given) -}}
{{- fail (printf "%s: contains what looks like a key, which everybody who may read the ConfigMap would see. Put it into a Secret and name its variable." $place) -}}
{{- end -}}
{{- end -}}
{{- $postgres := .Values.secrets.postgres -}}
{{- $seen := list -}}
{{- range .Values.allowedEnv -}}
{{- $own = concat $own (list (upper .) (printf "%s_FILE" (upper .))) -}}
{{- if hasSuffix "_FILE" (upper .) -}}
{{- fail (printf "allowedEnv: %s would name the file of another variable. Remove it, and use secrets.keys.asFiles for keys in files." .) -}}
{{- end -}}
{{- end -}}
{{- range $variable, $key := dict "PGSSLROOTCERT" $postgres.caKey "PGSSLCERT" $postgres.certKey "PGSSLKEY" $postgres.keyKey -}}
{{- if $key -}}{{- $own = append $own $variable -}}{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if has .name $seen -}}
{{- fail (printf "extraEnv: %s is duplicate." .name) -}}
{{- end -}}
{{- $seen = append $seen .name -}}
{{- if eq (hasKey . "value") (hasKey . "valueFrom") -}}
{{- fail (printf "extraEnv: %s needs either value or valueFrom." .name) -}}
{{- end -}}
{{- if regexMatch "(?i)(jina_[a-z0-9]{20}|password=|passwd=|secret=|token=|key=|bearer |basic )" (.value | default "") -}}
{{- fail (printf "extraEnv: the value of %s looks like a secret, which everybody who may read the Deployment would see. Use valueFrom with a Secret." .name) -}}
{{- end -}}
{{- if regexMatch "(://[^?#]*|^[^/@]+:[^/@]+)@" (.value | default "") -}}
{{- fail (printf "extraEnv: %s contains a URL with user information, which everybody who may read the Deployment would see. Use valueFrom with a Secret." .name) -}}
{{- end -}}
{{- if has (upper .name) $own -}}
{{- fail (printf "extraEnv: %s is set by the chart. Use nats, secrets, allowedEnv or config instead." .name) -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if and (hasKey . "value") (regexMatch "(?i)^(PGPASSWORD|.*_PASSWORD|.*SECRET.*|.*_HEADERS|.*_TOKEN|.*_API_KEY|OPENAPI_TOOL__(NATS|POSTGRES|SESSION|EGRESS|SECRETS)(__.*)?)$" .name) -}}
{{- fail (printf "extraEnv: the value of %s would be stored in plain text in the Deployment. Use nats, secrets or config, or valueFrom with a Secret." .name) -}}
{{- end -}}
{{- if and (regexMatch "(?i)^OPENAPI_TOOL__" .name) (or (hasKey . "value") (ne .name "OPENAPI_TOOL__TELEMETRY__OTLP_ENDPOINT")) -}}
{{- fail (printf "extraEnv: %s is a setting. Put it into config, from which the memory limit and the grace period are computed." .name) -}}
{{- end -}}
{{- end -}}
{{- range $setting, $instead := dict
    "postgres.dsn" "secrets.postgres" "nats.password" "secrets.nats" "nats.token" "secrets.nats"
    "quotas.nats.password" "quotas.nats" "quotas.nats.token" "quotas.nats" "session.key" "secrets.session" "egress.proxy" "secrets.proxy" -}}
{{- $path := splitList "." $setting -}}
{{- $section := $.Values.config | default dict -}}
{{- range initial $path -}}{{- $section = get $section . | default dict -}}{{- end -}}
{{- if hasKey $section (last $path) -}}
{{- fail (printf "config.%s: a secret would be stored in a ConfigMap. Put it into a Secret, and name that in %s." $setting $instead) -}}
{{- end -}}
{{- end -}}
{{- range $setting, $instead := dict
    "nats.servers" "nats.servers" "secrets.allowed_env" "allowedEnv" "nats.user" "secrets.nats.userKey"
    "nats.ca_file" "secrets.natsTls" "nats.cert_file" "secrets.natsTls" "nats.key_file" "secrets.natsTls"
    "nats.credentials_file" "secrets.nats.credentialsKey" "nats.nkey_seed_file" "secrets.nats.nkeySeedKey"
    "nats.password_file" "secrets.nats.passwordKey" "nats.token_file" "secrets.nats.tokenKey"
    "quotas.nats.servers" "quotas.nats.servers" "quotas.nats.user" "quotas.nats.userKey"
    "quotas.nats.ca_file" "quotas.natsTls" "quotas.nats.cert_file" "quotas.natsTls"
    "quotas.nats.key_file" "quotas.natsTls" "quotas.nats.credentials_file" "quotas.nats.credentialsKey"
    "quotas.nats.password_file" "quotas.nats.passwordKey" "quotas.nats.token_file" "quotas.nats.tokenKey"
    "quotas.nats.nkey_seed_file" "quotas.nats.nkeySeedKey" "egress.ca_file" "secrets.upstreamCa"
    "gateway.tokens_file" "gateway.tokens" "gateway.port" "gateway.service.port" -}}
{{- $path := splitList "." $setting -}}
{{- $section := $.Values.config | default dict -}}
{{- range initial $path -}}{{- $section = get $section . | default dict -}}{{- end -}}
{{- if hasKey $section (last $path) -}}
{{- fail (printf "config.%s: the chart sets it from %s. Set that instead." $setting $instead) -}}
{{- end -}}
{{- end -}}
{{- include "openapi-tool.checkLogin" . -}}
{{- with .Values.autoscaling -}}
{{- if gt (.minReplicas | int) (.maxReplicas | int) -}}
{{- fail "autoscaling: minReplicas is more than maxReplicas." -}}
{{- end -}}
{{- if and (eq .kind "hpa") (lt (.minReplicas | int) 1) -}}
{{- fail "autoscaling.minReplicas: a HorizontalPodAutoscaler needs at least 1." -}}
{{- end -}}
{{- if and (eq .kind "hpa") (not .hpa.metrics) (not (toString ($.Values.resources.requests.cpu | default ""))) -}}
{{- fail "autoscaling.hpa: a target of CPU utilization needs resources.requests.cpu." -}}
{{- end -}}
{{- if and (eq .kind "keda") (not .keda.monitoringEndpoint) -}}
{{- fail "autoscaling.keda.monitoringEndpoint is empty: KEDA asks NATS there how many commands are pending. Set it, such as nats.nats.svc:8222." -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.rules (eq .Values.autoscaling.kind "keda") (eq (.Values.autoscaling.minReplicas | int) 0) -}}
{{- fail "monitoring.rules: an alert fires when there is no pod, which autoscaling.minReplicas: 0 makes normal. Set minReplicas to 1, or rules to false." -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled $.Values.secrets.proxy.name (not .proxy.enabled) -}}
{{- fail "networkPolicy.proxy.enabled: secrets.proxy is set, and the policy blocks egress to it. Set it to true, with the proxy's port." -}}
{{- end -}}
{{- if and .enabled ($.Values.config | default dict | dig "telemetry" "otlp_endpoint" "") (not .otlp.enabled) -}}
{{- fail "networkPolicy.otlp.enabled: config.telemetry.otlp_endpoint is set, and the policy blocks egress to it. Set it to true, with the collector's port." -}}
{{- end -}}
{{- if and .enabled (not .upstream.enabled) (not (and .proxy.enabled $.Values.secrets.proxy.name)) -}}
{{- fail "networkPolicy.upstream.enabled: without it and without a proxy no call reaches Jina." -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.monitoring.monitor "service") (not .Values.monitoring.service) -}}
{{- fail "monitoring.monitor: a ServiceMonitor needs monitoring.service: true." -}}
{{- end -}}
{{- with .Values.strategy -}}
{{- $none := list "0" "0%" "00%" "000%" -}}
{{- if and (has (toString .rollingUpdate.maxUnavailable) $none) (has (toString .rollingUpdate.maxSurge) $none) -}}
{{- fail "strategy.rollingUpdate: maxUnavailable and maxSurge are both 0, so no pod could be replaced." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.checkNames" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "openapi-tool.name" .)) -}}
{{- fail (printf "%s is not a valid name of a Service (RFC 1035: letters, digits and '-', first a letter). Choose another release name, or set fullnameOverride." (include "openapi-tool.name" .)) -}}
{{- end -}}
{{- $values := .Values -}}
{{- range $where, $labels := dict
    "gateway.service.labels" $values.gateway.service.labels "gateway.serviceAccount.labels" $values.gateway.serviceAccount.labels
    "commonLabels" $values.commonLabels "podLabels" $values.podLabels "monitoring.labels" $values.monitoring.labels
    "monitoring.dashboardLabels" $values.monitoring.dashboardLabels -}}
{{- range $key, $_ := $labels -}}
{{- if regexMatch "^app[.]kubernetes[.]io/(name|instance|version|managed-by)$" $key -}}
{{- fail (printf "%s: %s is set by the chart, whose selectors need it. Remove it." $where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $where, $annotations := dict
    "gateway.annotations" $values.gateway.annotations "gateway.service.annotations" $values.gateway.service.annotations
    "gateway.ingress.annotations" $values.gateway.ingress.annotations
    "gateway.serviceAccount.annotations" $values.gateway.serviceAccount.annotations
    "commonAnnotations" $values.commonAnnotations "annotations" $values.annotations "podAnnotations" $values.podAnnotations
    "serviceAccount.annotations" $values.serviceAccount.annotations -}}
{{- range $key, $_ := $annotations -}}
{{- if regexMatch "^(checksum/config|helm[.]sh/hook.*|meta[.]helm[.]sh/.*)$" $key -}}
{{- fail (printf "%s: %s is reserved for the chart or Helm. Remove it." $where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.checkServers" -}}
{{- range $where, $servers := dict "nats.servers" .Values.nats.servers "quotas.nats.servers" .Values.quotas.nats.servers
    "gateway.nats.servers" .Values.gateway.nats.servers -}}
{{- $sockets := list -}}
{{- range $at, $url := $servers -}}
{{- if contains "@" $url -}}
{{- fail (printf "%s: a URL contains user information, which everybody who may read the Deployment would see. Put user and password into a Secret, and name it in %s." $where (ternary "secrets.nats" (trimSuffix ".servers" $where) (eq $where "nats.servers"))) -}}
{{- end -}}
{{- if not (regexMatch `^[a-z]+://(\[[0-9A-Fa-f:.]+\]|[^\s,/?#:%\[\]\\]+)(:[1-9][0-9]{0,4})?$` $url) -}}
{{- fail (printf "%s: entry %d is not one URL such as nats://host:4222. Give each server its own entry, its port without leading zeros, and nothing after it." $where (add1 $at)) -}}
{{- end -}}
{{- if gt (include "openapi-tool.port" $url | int) 65535 -}}
{{- fail (printf "%s: entry %d: a port is a number from 1 to 65535." $where (add1 $at)) -}}
{{- end -}}
{{- $sockets = append $sockets (hasPrefix "ws" $url) -}}
{{- end -}}
{{- if gt (len (uniq $sockets)) 1 -}}
{{- fail (printf "%s: must be all nats:// and tls://, or all ws:// and wss://." $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Values for the NATS of the quotas are refused without its servers, or without a name of this kernel there. */}}
{{- define "openapi-tool.checkQuotas" -}}
{{- $config := dig "quotas" (dict) (.Values.config | default dict) -}}
{{- with .Values.quotas -}}
{{- if and (not .nats.servers) (or .nats.name .natsTls.name (hasKey $config "nats")) -}}
{{- fail "quotas.nats.servers is empty: without servers of their own, the records of quotas are in nats.servers." -}}
{{- end -}}
{{- if and .nats.servers (not (get $config "kernel")) -}}
{{- fail "config.quotas.kernel is empty: a name of this kernel must tell its projects from those of other kernels in quotas.nats.servers." -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.checkGateway" -}}
{{- if not (or .Values.serve.enabled .Values.gateway.enabled) -}}
{{- fail "serve.enabled and gateway.enabled are both false, so nothing would run. Set one to true." -}}
{{- end -}}
{{- with .Values.gateway -}}
{{- if and (not .nats.servers) (or .nats.name .natsTls.name) -}}
{{- fail "gateway.nats.servers is empty: without servers there is nothing to log in to. Set them, or remove the login." -}}
{{- end -}}
{{- if and .nats.servers .state.claim -}}
{{- fail "gateway.state.claim: with gateway.nats.servers there is no state file. Remove one." -}}
{{- end -}}
{{- if and .enabled (not .nats.servers) (or .autoscaling.enabled (gt (int .replicaCount) 1)) -}}
{{- fail "gateway: each pod has a state file of its own, so that several would not share tokens, limits, budgets and texts. Set gateway.nats.servers, or replicaCount to 1 without autoscaling." -}}
{{- end -}}
{{- if and .enabled (not .nats.servers) (not .tokens.name) (not (dig "gateway" "oauth" "" ($.Values.config | default dict))) -}}
{{- fail "gateway.tokens.name: a gateway without tokens refuses to serve other machines. Create a Secret from the file of `openapi-tool tokens create --file tokens.json` and name it, or set gateway.nats.servers, which then holds the tokens." -}}
{{- end -}}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) -}}
{{- fail "gateway.autoscaling: minReplicas is more than maxReplicas." -}}
{{- end -}}
{{- if and .autoscaling.enabled (not .autoscaling.metrics) (not (toString (.resources.requests.cpu | default ""))) -}}
{{- fail "gateway.autoscaling: a target of CPU utilization needs gateway.resources.requests.cpu." -}}
{{- end -}}
{{- if and .ingress.enabled (not .ingress.hosts) -}}
{{- fail "gateway.ingress.hosts is empty: a gateway answers only to names that it knows. Set them." -}}
{{- end -}}
{{- include "openapi-tool.checkDefinitions" (dict "where" "gateway.tools" "definitions" .tools) -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.checkVolumes" -}}
{{- $own := list "config" "postgres" "nats" "nats-tls" "quotas-nats" "quotas-nats-tls" "upstream-ca" "keys" "tools"
    "gateway-nats" "gateway-nats-tls" "gateway-tokens" "gateway-tools" "state" -}}
{{- $names := list -}}
{{- range .Values.extraVolumes -}}
{{- if or (has .name $own) (has .name $names) -}}
{{- fail (printf "extraVolumes: the name %s is taken. Choose another." .name) -}}
{{- end -}}
{{- if ne (len .) 2 -}}
{{- fail (printf "extraVolumes: %s must have exactly one type, such as emptyDir, configMap or secret." .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $paths := list -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $names) -}}
{{- fail (printf "extraVolumeMounts: %s is not in extraVolumes." .name) -}}
{{- end -}}
{{- $path := clean .mountPath -}}
{{- if or (eq $path "/") (regexMatch "^/(etc|opt|var|var/lib)(/openapi-tool(/.*)?)?$" $path) -}}
{{- fail (printf "extraVolumeMounts: %s would hide the executor or its settings. Choose another path." .mountPath) -}}
{{- end -}}
{{- if has $path $paths -}}
{{- fail (printf "extraVolumeMounts: %s is duplicate." .mountPath) -}}
{{- end -}}
{{- $paths = append $paths $path -}}
{{- end -}}
{{- end -}}

{{/* Only checks that each file is a definition; `tools apply` checks definitions in full before it writes. */}}
{{- define "openapi-tool.checkTools" -}}
{{- with .Values.toolsJob -}}
{{- if and .enabled (not (and .projects .definitions)) -}}
{{- fail "toolsJob: set at least one project and one definition, or disable it." -}}
{{- end -}}
{{- if contains "@" (.api | default "") -}}
{{- fail "toolsJob.api: the URL contains user information, which everybody who may read the Job would see." -}}
{{- end -}}
{{- if not (regexMatch `^(https?://[^\s/?#]+(/[^\s?#]*)?)?$` (.api | default "")) -}}
{{- fail "toolsJob.api: must be a URL such as http://kernel:8000." -}}
{{- end -}}
{{- if and .api .postgresSecret -}}
{{- fail "toolsJob: api and postgresSecret are two ways to register tools. Remove one of them." -}}
{{- end -}}
{{- include "openapi-tool.checkDefinitions" (dict "where" "toolsJob.definitions" "definitions" .definitions) -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.checkDefinitions" -}}
{{- $names := list -}}
{{- range $file, $text := .definitions -}}
{{- $definition := fromYaml $text -}}
{{- if hasKey $definition "Error" -}}
{{- fail (printf "%s: %s is not the YAML of one definition. `openapi-tool tools lint %s` says why." $.where $file $file) -}}
{{- end -}}
{{- $name := get $definition "tool_name" -}}
{{- if not (and $name (kindIs "string" $name)) -}}
{{- fail (printf "%s: %s names no tool (tool_name). `openapi-tool tools lint %s` names every mistake." $.where $file $file) -}}
{{- end -}}
{{- if has $name $names -}}
{{- fail (printf "%s: more than one file defines %s." $.where $name) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}

{{/* Combinations of settings that the executor refuses. Its defaults are repeated here; a test compares them.
`openapi-tool check` (helm test) reports all other mistakes. */}}
{{- define "openapi-tool.checkConfig" -}}
{{- $config := .Values.config | default dict -}}
{{- $health := get $config "health" | default dict -}}
{{- if hasKey (get $config "gateway" | default dict) "host" -}}
{{- fail "config.gateway.host: the chart sets it, as clients must reach the pods. Remove it." -}}
{{- end -}}
{{- if or (hasKey $health "host") (hasKey $health "port") -}}
{{- fail "config.health: the chart sets host and port, which the probes need. Remove them." -}}
{{- end -}}
{{- $otlp := dig "telemetry" "otlp_endpoint" "" $config -}}
{{- if contains "@" $otlp -}}
{{- fail "config.telemetry.otlp_endpoint: the URL contains user information, which would be stored in a ConfigMap. Put it into a Secret, and set OPENAPI_TOOL__TELEMETRY__OTLP_ENDPOINT from it by extraEnv." -}}
{{- end -}}
{{- if not (regexMatch `^((?i:https?)://[^\s/?#]+(/[^\s#]*)?)?$` $otlp) -}}
{{- fail "config.telemetry.otlp_endpoint: must be a URL such as https://collector:4318/v1/traces." -}}
{{- end -}}
{{- $nats := get $config "nats" | default dict -}}
{{- $protocol := get $config "protocol" | default dict -}}
{{- if and (not (hasKey $nats "durable")) (or (ne (get $protocol "project" | default "*") "*") (ne (get $protocol "channel" | default "*") "*")) -}}
{{- fail "config.nats.durable: must be set where protocol.project or protocol.channel narrows the filter." -}}
{{- end -}}
{{- if and .Values.secrets.proxy.name (dig "egress" "public_addresses_only" false $config) -}}
{{- fail "config.egress.public_addresses_only: has no effect with secrets.proxy, which resolves the names. Remove one." -}}
{{- end -}}
{{- include "openapi-tool.checkNumbers" $config -}}
{{- end -}}

{{- define "openapi-tool.checkNumbers" -}}
{{- $runTime := subf (dig "executor" "worker_timeout_s" 30 . | float64) (dig "executor" "commit_margin_s" 3 . | float64) -}}
{{- if le $runTime 0.0 -}}
{{- fail "config.executor.commit_margin_s: must be less than worker_timeout_s, or no call has time to run." -}}
{{- end -}}
{{- if ge (dig "executor" "requeue_delay_s" 2 . | float64) $runTime -}}
{{- fail (printf "config.executor.requeue_delay_s: must be less than executor.worker_timeout_s less executor.commit_margin_s (%v s)." $runTime) -}}
{{- end -}}
{{- if gt (dig "tools" "default_timeout_s" 0 . | float64) (dig "tools" "max_timeout_s" 120 . | float64) -}}
{{- fail "config.tools.default_timeout_s: must not be more than max_timeout_s." -}}
{{- end -}}
{{- if gt (dig "retry" "initial_backoff_s" 0.5 . | float64) (dig "retry" "max_backoff_s" 8 . | float64) -}}
{{- fail "config.retry.initial_backoff_s: must not be more than max_backoff_s." -}}
{{- end -}}
{{- $least := mul (dig "egress" "max_response_bytes" 10000000 . | int64) 15 -}}
{{- if lt (dig "egress" "body_budget_bytes" 256000000 . | int64) $least -}}
{{- fail (printf "config.egress.body_budget_bytes: must be at least %d, so that the largest response (max_response_bytes) fits." $least) -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.checkLogin" -}}
{{- $secrets := .Values.secrets -}}
{{- range $where, $tls := dict "secrets.natsTls" $secrets.natsTls "quotas.natsTls" .Values.quotas.natsTls "gateway.natsTls" .Values.gateway.natsTls -}}
{{- if and (not $tls.name) (or $tls.certKey $tls.keyKey) -}}
{{- fail (printf "%s: certKey and keyKey are keys of a Secret. Give its name." $where) -}}
{{- end -}}
{{- end -}}
{{- range $where, $login := dict "secrets.nats" $secrets.nats "quotas.nats" .Values.quotas.nats "gateway.nats" .Values.gateway.nats -}}
{{- $ways := compact (list $login.userKey $login.tokenKey $login.credentialsKey $login.nkeySeedKey) -}}
{{- if gt (len $ways) 1 -}}
{{- fail (printf "%s: only one of userKey, tokenKey, credentialsKey and nkeySeedKey may be set." $where) -}}
{{- end -}}
{{- if ne (empty $login.userKey) (empty $login.passwordKey) -}}
{{- fail (printf "%s: set both userKey and passwordKey, or neither." $where) -}}
{{- end -}}
{{- if ne (empty $login.name) (empty $ways) -}}
{{- fail (printf "%s: name and one way to log in (userKey and passwordKey, tokenKey, credentialsKey or nkeySeedKey) must be set together." $where) -}}
{{- end -}}
{{- end -}}
{{- range $where, $secret := dict "secrets.natsTls" $secrets.natsTls "secrets.postgres" $secrets.postgres "quotas.natsTls" .Values.quotas.natsTls "gateway.natsTls" .Values.gateway.natsTls -}}
{{- if ne (empty $secret.certKey) (empty $secret.keyKey) -}}
{{- fail (printf "%s: set both certKey and keyKey, or neither." $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
