{{/* Labels of every object. */}}
{{- define "archaware.labels" -}}
app.kubernetes.io/name: archaware
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Those of objects that give permissions. */}}
{{- define "archaware.accessLabels" -}}
{{ include "archaware.labels" . }}
app.kubernetes.io/component: access
{{- end -}}

{{- define "archaware.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What the values mean for the configuration; `config` wins. */}}
{{- define "archaware.config" -}}
{{- $config := dict "apiVersion" "archaware.dev/v1alpha1" "kind" "Configuration" -}}
{{- $socket := "/run/archaware/containerd.sock" -}}
{{- if eq .Values.containerd "host" -}}
{{- $_ := set $config "containerd" (dict "socket" $socket) -}}
{{- else if eq .Values.containerd "sidecar" -}}
{{- $_ := set $config "containerd" (dict "socket" $socket "readNamespaces" list) -}}
{{- end -}}
{{- if .Values.webhook.enabled -}}
{{- $admission := dict "enabled" true "onMiss" "gate" -}}
{{- if .Values.webhook.certManager.enabled -}}
{{- $folder := "/etc/archaware-certificate" -}}
{{- $_ := set $admission "certificates" (dict "certificate" (printf "%s/tls.crt" $folder) "key" (printf "%s/tls.key" $folder) "authority" (printf "%s/ca.crt" $folder)) -}}
{{- end -}}
{{- $_ := set $config "admission" $admission -}}
{{- else -}}
{{- $_ := set $config "admission" (dict "enabled" false) -}}
{{- end -}}
{{- if and .Values.webhook.enabled (ne (int .Values.ports.webhook) 8443) -}}
{{- $_ := set $config.admission "listen" (printf ":%d" (int .Values.ports.webhook)) -}}
{{- end -}}
{{- mustMergeOverwrite $config (deepCopy (.Values.config | default dict)) | toYaml -}}
{{- end -}}

{{- define "archaware.subjects" -}}
- {kind: ServiceAccount, name: archaware, namespace: {{ .Release.Namespace | quote }}}
{{- end -}}

{{/* Where the pods of archaware, and of its last command, may run. */}}
{{- define "archaware.placement" -}}
serviceAccountName: archaware
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
# The architectures of its own image: while no replica runs, nothing else decides where it runs.
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - {key: kubernetes.io/os, operator: In, values: [linux]}
            - {key: kubernetes.io/arch, operator: In, values: {{ toJson .Values.architectures }}}
tolerations:
  # archaware's own taint.
  - {key: {{ dig "taint" "key" "kubernetes.io/arch" (.Values.config | default dict) | quote }}, operator: Exists}
  - {key: node-role.kubernetes.io/control-plane, operator: Exists, effect: NoSchedule}
  # Evicted from an unreachable node after half a minute instead of five.
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
  {{- if eq .Values.containerd "sidecar" }}
  # The kubelet gives volumes of claims to this group; otherwise they belong to root.
  fsGroup: 65532
  {{- end }}
{{- end -}}

{{- define "archaware.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Labels and annotations of pods: those of the chart, and the user's. */}}
{{- define "archaware.podMetadata" -}}
labels: {{- merge (dict "app.kubernetes.io/name" .name) (.context.Values.podLabels | default dict) | toYaml | nindent 2 }}
annotations: {{- merge (deepCopy (.context.Values.podAnnotations | default dict)) .annotations | toYaml | nindent 2 }}
{{- end -}}

{{/* Whether the certificate comes from files that the user names. */}}
{{- define "archaware.ownCertificate" -}}
{{- if or .Values.webhook.certManager.enabled (dig "admission" "certificates" "certificate" "" (.Values.config | default dict)) -}}
yes
{{- end -}}
{{- end -}}
