{{- define "openapi-tool.name" -}}
{{- default (printf "%s-%s" .Release.Name .Chart.Name) .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
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
    "app.kubernetes.io/name" (.app | default .root.Chart.Name) "app.kubernetes.io/instance" .root.Release.Name
    "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- merge $own (.labels | default dict) (.root.Values.commonLabels | default dict) | toYaml -}}
{{- end -}}

{{- define "openapi-tool.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Label app.kubernetes.io/name of pods that are not executors: the selectors must not match them. */}}
{{- define "openapi-tool.job" -}}
{{ .Chart.Name }}-job
{{- end -}}

{{- define "openapi-tool.serviceAccount" -}}
{{- with .Values.serviceAccount -}}
{{- .name | default (ternary (include "openapi-tool.name" $) "default" .create) -}}
{{- end -}}
{{- end -}}

{{- define "openapi-tool.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* 128 MiB for the process, its memory budgets plus a quarter for memory that the allocator cannot return, and 1 MiB
per call of each kernel. */}}
{{- define "openapi-tool.memoryLimit" -}}
{{- $config := .Values.config | default dict -}}
{{- $responses := dig "egress" "body_budget_bytes" 256000000 $config | int64 -}}
{{- $cache := dig "cache" "max_bytes" 4000000 $config | int64 -}}
{{- $kernels := ternary 1 2 (empty .Values.v1r3.postgres.name) -}}
{{- $calls := mul $kernels (dig "executor" "concurrency" 64 $config | int64) -}}
{{- $bytes := add (div (mul (add $responses $cache) 5) 4) (mul $calls 1048576) 134217728 -}}
{{- printf "%dMi" (div (add $bytes 1048575) 1048576) -}}
{{- end -}}

{{/* Seconds that a pod needs to stop: it continues to fetch, then drains. */}}
{{- define "openapi-tool.stopSeconds" -}}
{{- add .Values.preStopSleepSeconds (.Values.config | default dict | dig "executor" "drain_timeout_s" 25.0 | float64 | ceil | int64) -}}
{{- end -}}

{{/* Adds 15 s: 10 for calls that do not end when they are cancelled, 5 to close connections. */}}
{{- define "openapi-tool.grace" -}}
{{- $stop := include "openapi-tool.stopSeconds" . | int64 -}}
{{- $grace := .Values.terminationGracePeriodSeconds | default (add $stop 15) | int64 -}}
{{- if lt $grace (add $stop 5) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, but running calls need %d: preStopSleepSeconds + config.executor.drain_timeout_s + 5. Raise it, or do not set it." $grace (add $stop 5)) -}}
{{- end -}}
{{- $grace -}}
{{- end -}}

{{/* PromQL matchers of this Deployment's pods, which are called NAME-HASH-SUFFIX with a hash of up to 10 characters;
Kubernetes truncates everything before the suffix to 58. */}}
{{- define "openapi-tool.matchers" -}}
{{- $name := include "openapi-tool.name" . -}}
{{- $pods := ternary "%s-[a-z0-9]+-[a-z0-9]+" "%s[a-z0-9-]+" (le (len $name) 46) -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ printf $pods (gt (len $name) 46 | ternary (printf "%s-" $name | trunc 58) $name) }}"
{{- end -}}

{{/* Dashboard that shows only this release, with its own uid and title. */}}
{{- define "openapi-tool.dashboard" -}}
{{- $matchers := include "openapi-tool.matchers" . | replace `"` `\"` -}}
{{- $dashboard := .Files.Get "files/dashboard.json" | replace `namespace=\"$namespace\"` $matchers | replace `,pod=~\".*openapi-tool.*\"` "" | fromJson -}}
{{- $release := printf "%s/%s" .Release.Namespace (include "openapi-tool.name" .) -}}
{{- $_ := set $dashboard "uid" (printf "openapi-tool-%s" (sha256sum $release | trunc 20)) -}}
{{- $_ := set $dashboard "title" (printf "openapi-tool (%s)" $release) -}}
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

{{/* Requests and limits that are set; the memory limit is computed if it is not. */}}
{{- define "openapi-tool.resources" -}}
{{- $found := dict -}}
{{- range $kind := list "requests" "limits" -}}
{{- $set := dict -}}
{{- range $name, $quantity := get $.Values.resources $kind -}}
{{- if ne (toString ($quantity | default "")) "" -}}
{{- $_ := set $set $name (include "openapi-tool.quantity" $quantity) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $found $kind $set -}}
{{- end -}}
{{- $_ := set $found "limits" (merge $found.limits (dict "memory" (include "openapi-tool.memoryLimit" .))) -}}
{{- range $name, $request := $found.requests -}}
{{- $limit := get $found.limits $name -}}
{{- if and $limit (gt (include "openapi-tool.amount" $request | float64) (include "openapi-tool.amount" $limit | float64)) -}}
{{- fail (printf "resources: requests.%s (%s) is more than limits.%s (%s)." $name $request $name $limit) -}}
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
