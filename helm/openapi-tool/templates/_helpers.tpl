{{- define "openapi-tool.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "openapi-tool.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "openapi-tool.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* 128 MiB for the process, a quarter more than its budgets for what the allocator cannot give back, 1 MiB a call. */}}
{{- define "openapi-tool.memoryLimit" -}}
{{- $config := fromToml .Values.config -}}
{{- $answers := dig "egress" "body_budget_bytes" 256000000 $config | int64 -}}
{{- $cache := dig "cache" "max_bytes" 4000000 $config | int64 -}}
{{- $calls := dig "executor" "concurrency" 64 $config | int64 -}}
{{- $bytes := add (div (mul (add $answers $cache) 5) 4) (mul $calls 1048576) 134217728 -}}
{{- printf "%dMi" (div (add $bytes 1048575) 1048576) -}}
{{- end -}}
