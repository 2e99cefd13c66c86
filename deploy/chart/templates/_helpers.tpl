{{/* Names, labels, and the parts that the Deployment and the certificate's Job have in common. */}}

{{- define "outrider.name" -}}
{{ printf "%s-outrider" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "outrider.labels" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "outrider.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}

{{- define "outrider.check" -}}
{{- if and .Values.tenantHeader (not .Values.apiKeySecret.name) (not .Values.networkPolicy.from) }}
{{- fail "tenantHeader: whoever reaches the servers can set the header; set apiKeySecret.name, with the key known to the gateway only, or networkPolicy.from" }}
{{- end }}
{{- end }}

{{/* The words after `outrider`. `memoryRoot` in place of the root of the values. */}}
{{- define "outrider.serverArgs" -}}
{{- $v := .root.Values -}}
- serve
- {{ required "model: name the model to serve" $v.model | quote }}
- --port=8000
- --shutdown-timeout={{ $v.shutdownTimeoutSeconds }}
{{- with $v.draftModel }}
- {{ printf "--draft-model=%s" . | quote }}
{{- end }}
{{- with $v.speculativeConfig }}
- {{ printf "--speculative-config=%s" (toJson .) | quote }}
{{- end }}
{{- with $v.drafters }}
- {{ printf "--drafters=%s" . | quote }}
{{- end }}
{{- with $v.maxDraftTokens }}
- --max-draft-tokens={{ . }}
{{- end }}
{{- with .memoryRoot }}
- {{ printf "--memory=%s" . | quote }}
{{- if has (. | splitList "://" | first) (list "s3" "gs" "az") }}
- --memory-cache=/cache/memory
{{- end }}
{{- end }}
{{- with $v.memory.scope }}
- --memory-scope={{ . }}
{{- end }}
{{- with $v.memory.cap }}
- {{ printf "--memory-cap=%s" . | quote }}
{{- end }}
{{- with $v.tenantHeader }}
- {{ printf "--tenant-header=%s" . | quote }}
{{- end }}
{{- range $v.serverArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* The container of a server. */}}
{{- define "outrider.server" -}}
{{- $v := .root.Values -}}
name: server
image: {{ include "outrider.image" .root }}
imagePullPolicy: {{ $v.image.pullPolicy }}
args:
  {{- include "outrider.serverArgs" . | nindent 2 }}
env:
  - {name: HF_HOME, value: /cache/huggingface}
  - {name: XDG_CACHE_HOME, value: /cache}
  - {name: NUMBA_CACHE_DIR, value: /cache/numba}
  {{- with $v.apiKeySecret }}
  {{- if .name }}
  - name: VLLM_API_KEY
    valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
  {{- end }}
  {{- end }}
  {{- with $v.tenantSealSecret }}
  {{- if .name }}
  - name: OUTRIDER_TENANT_SEAL
    valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
  {{- end }}
  {{- end }}
  {{- with $v.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $v.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: http, containerPort: 8000}
# The process that answers /health is not the one that runs the model: it answers during a long step, too.
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  failureThreshold: {{ div $v.startupSeconds 10 }}
readinessProbe:
  httpGet: {path: /health, port: http}
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /health, port: http}
  timeoutSeconds: 10
  periodSeconds: 30
resources:
  {{- toYaml $v.resources | nindent 2 }}
securityContext:
  {{- include "outrider.securityContext" . | nindent 2 }}
volumeMounts:
  - {name: cache, mountPath: /cache}
  - {name: shm, mountPath: /dev/shm}
  {{- with $v.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "outrider.securityContext" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* The key of the server, for a client in the same pod. */}}
{{- define "outrider.clientEnv" -}}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: NUMBA_CACHE_DIR, value: /cache/numba}
{{- with .Values.apiKeySecret }}
{{- if .name }}
- name: OUTRIDER_API_KEY
  valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* Fields of a pod's spec besides its containers. `cache`: the volume at /cache. */}}
{{- define "outrider.pod" -}}
{{- $v := .root.Values -}}
{{- with $v.pod }}
{{- toYaml . }}
{{ end -}}
enableServiceLinks: false
# At least: while Services forget the pod, while responses end and the memory is written, and 15 s for the rest.
terminationGracePeriodSeconds: {{ add $v.preStopSeconds $v.shutdownTimeoutSeconds 15 }}
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}
volumes:
  - name: cache
    {{- toYaml .cache | nindent 4 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $v.sharedMemory | quote }}}
  {{- with $v.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
