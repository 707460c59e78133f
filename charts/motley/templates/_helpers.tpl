{{- define "motley.labels" -}}
app.kubernetes.io/name: motley
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "motley.selector" -}}
app.kubernetes.io/name: motley
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "motley.image" -}}
{{ index .root.Values.images .role }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end }}
