{{/* Common parts of the pods of the executor, its Job and its test. */}}
{{- define "openapi-tool.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "openapi-tool.serviceAccount" . | quote }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.runAsUser }}
  runAsGroup: {{ int64 .Values.runAsUser }}
  fsGroup: {{ int64 .Values.runAsUser }}
  seccompProfile:
    type: RuntimeDefault
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

{{- define "openapi-tool.container" -}}
image: {{ include "openapi-tool.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: ["ALL"]
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
{{- range $setting, $key := dict "USER" .login.userKey "PASSWORD" .login.passwordKey "TOKEN" .login.tokenKey }}
{{- if $key }}
{{- include "openapi-tool.secretEnv" (dict "variable" (print $.prefix $setting) "secret" $.login.name "key" $key) }}
{{- end }}
{{- end }}
{{- range $setting, $key := dict "CREDENTIALS_FILE" .login.credentialsKey "NKEY_SEED_FILE" .login.nkeySeedKey }}
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

{{- define "openapi-tool.env" -}}
- name: NATS_SERVERS
  value: {{ join "," .Values.nats.servers | quote }}
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
{{- include "openapi-tool.postgresEnv" . }}
{{- include "openapi-tool.natsEnv" (dict "prefix" "OPENAPI_TOOL__NATS__" "volume" "nats" "login" .Values.secrets.nats "tls" .Values.secrets.natsTls) }}
{{- with .Values.v1r3 }}
{{- if .postgres.name }}
{{- include "openapi-tool.secretEnv" (dict "variable" "OPENAPI_TOOL__DIALECTS__V1R3__POSTGRES__DSN" "secret" .postgres.name "key" .postgres.dsnKey) }}
{{- if .nats.servers }}
- name: OPENAPI_TOOL__DIALECTS__V1R3__NATS__SERVERS
  value: {{ join "," .nats.servers | quote }}
{{- include "openapi-tool.natsEnv" (dict "prefix" "OPENAPI_TOOL__DIALECTS__V1R3__NATS__" "volume" "v1r3-nats" "login" .nats "tls" .natsTls) }}
{{- end }}
{{- end }}
{{- end }}
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

{{/* Mounted Secrets by the name of their volume; only the keys that are read. */}}
{{- define "openapi-tool.mounted" -}}
{{- $secrets := .Values.secrets -}}
{{- $older := .Values.v1r3 -}}
{{- $mounted := dict
  "postgres" (dict "name" $secrets.postgres.name "keys" (list $secrets.postgres.caKey $secrets.postgres.certKey $secrets.postgres.keyKey))
  "nats" (dict "name" $secrets.nats.name "keys" (list $secrets.nats.credentialsKey $secrets.nats.nkeySeedKey))
  "nats-tls" (dict "name" $secrets.natsTls.name "keys" (list $secrets.natsTls.caKey $secrets.natsTls.certKey $secrets.natsTls.keyKey))
  "v1r3-nats" (dict "name" $older.nats.name "keys" (list $older.nats.credentialsKey $older.nats.nkeySeedKey))
  "v1r3-nats-tls" (dict "name" $older.natsTls.name "keys" (list $older.natsTls.caKey $older.natsTls.certKey $older.natsTls.keyKey))
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
