#!/usr/bin/env bash
# Packs the folders of compile.sh as one OCI image for several platforms, in an OCI image layout.
#   VERSION=… REVISION=… CREATED=SECONDS hack/image/layout.sh LAYOUT ARCHITECTURE=FOLDER...
# Everything that differs from machine to machine is left out: order, times and owners of files, the time of packing.
set -euo pipefail
shopt -s inherit_errexit
layout=${1:?usage: layout.sh LAYOUT ARCHITECTURE=FOLDER...}
shift
rm -rf "$layout"
mkdir -p "$layout/blobs/sha256"
echo '{"imageLayoutVersion":"1.0.0"}' > "$layout/oci-layout"
created=$(date --utc --date="@${CREATED:?}" +%Y-%m-%dT%H:%M:%SZ)
annotations=$(jq -nc --arg version "$VERSION" --arg revision "$REVISION" --arg created "$created" '{
  "org.opencontainers.image.title": "archaware",
  "org.opencontainers.image.description": "Keeps pods off nodes whose CPU architecture their images cannot run on",
  "org.opencontainers.image.source": "https://github.com/archaware/archaware",
  "org.opencontainers.image.licenses": "Apache-2.0",
  "org.opencontainers.image.version": $version,
  "org.opencontainers.image.revision": $revision,
  "org.opencontainers.image.created": $created
}')

# blob MEDIATYPE FILE: moves it into the layout and prints its descriptor.
blob() {
  local digest size
  digest=$(sha256sum "$2" | cut -d' ' -f1)
  size=$(stat --format=%s "$2")
  mv "$2" "$layout/blobs/sha256/$digest"
  jq -nc --arg type "$1" --arg digest "sha256:$digest" --argjson size "$size" '{mediaType: $type, digest: $digest, size: $size}'
}

manifests=()
for image; do
  architecture=${image%%=*} root=${image#*=} work=$layout/work
  tar --create --directory="$root" --sort=name --mtime="@$CREATED" --owner=0 --group=0 --numeric-owner \
    --format=gnu --file="$work.tar" .
  content=sha256:$(sha256sum "$work.tar" | cut -d' ' -f1)
  gzip --no-name --best < "$work.tar" > "$work.layer"
  rm "$work.tar"
  layer=$(blob application/vnd.oci.image.layer.v1.tar+gzip "$work.layer")
  jq -nc --arg architecture "$architecture" --arg created "$created" --arg content "$content" --argjson labels "$annotations" '{
    created: $created, architecture: $architecture, os: "linux",
    config: {
      User: "65532:65532", Entrypoint: ["/archaware"], WorkingDir: "/", Labels: $labels,
      Env: ["PATH=/", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"]
    },
    rootfs: {type: "layers", diff_ids: [$content]},
    history: [{created: $created, created_by: "hack/build.sh"}]
  }' > "$work.config"
  config=$(blob application/vnd.oci.image.config.v1+json "$work.config")
  jq -nc --argjson config "$config" --argjson layer "$layer" --argjson annotations "$annotations" '{
    schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json",
    config: $config, layers: [$layer], annotations: $annotations
  }' > "$work.manifest"
  manifest=$(blob application/vnd.oci.image.manifest.v1+json "$work.manifest")
  manifests+=("$(jq -c --arg architecture "$architecture" '. + {platform: {os: "linux", architecture: $architecture}}' <<< "$manifest")")
done
printf '%s\n' "${manifests[@]}" | jq -sc --argjson annotations "$annotations" '{
  schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json", manifests: ., annotations: $annotations
}' > "$layout/work.index"
index=$(blob application/vnd.oci.image.index.v1+json "$layout/work.index")
# The layout's own index names the image with its tag.
jq -c --arg tag "$VERSION" '{
  schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
  manifests: [. + {annotations: {"org.opencontainers.image.ref.name": $tag}}]
}' <<< "$index" > "$layout/index.json"
jq -r .digest <<< "$index"
