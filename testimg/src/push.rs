//! Pushes images as the distribution specification describes: blobs, then children, then the root.

use reqwest::{Client, StatusCode, header};

use crate::blob::{Blob, Image};

/// Why an image could not be pushed.
pub type PushError = Box<dyn std::error::Error + Send + Sync>;

/// Pushes to `http://registry/repository:tag`.
///
/// # Errors
/// When the registry does not answer, or refuses a part of the image.
pub async fn push(
    http: &Client,
    registry: &str,
    repository: &str,
    tag: &str,
    image: &Image,
) -> Result<(), PushError> {
    let base = format!("http://{registry}/v2/{repository}");
    for blob in &image.blobs {
        push_blob(http, &base, blob).await?;
    }
    for manifest in &image.manifests {
        put(
            http,
            &format!("{base}/manifests/{}", manifest.digest),
            manifest,
        )
        .await?;
    }
    put(http, &format!("{base}/manifests/{tag}"), &image.root).await
}

async fn push_blob(http: &Client, base: &str, blob: &Blob) -> Result<(), PushError> {
    let held = http
        .head(format!("{base}/blobs/{}", blob.digest))
        .send()
        .await?;
    if held.status() == StatusCode::OK {
        return Ok(());
    }
    let upload = http
        .post(format!("{base}/blobs/uploads/"))
        .send()
        .await?
        .error_for_status()?;
    let place = upload
        .headers()
        .get(header::LOCATION)
        .ok_or("no place to upload to")?
        .to_str()?;
    let place = upload.url().join(place)?;
    let joint = if place.query().is_some() { '&' } else { '?' };
    let request = http.put(format!("{place}{joint}digest={}", blob.digest));
    request
        .body(blob.bytes.clone())
        .send()
        .await?
        .error_for_status()?;
    Ok(())
}

async fn put(http: &Client, url: &str, document: &Blob) -> Result<(), PushError> {
    let request = http
        .put(url)
        .header(header::CONTENT_TYPE, &document.media_type);
    let response = request.body(document.bytes.clone()).send().await?;
    let status = response.status();
    if !status.is_success() {
        return Err(format!("{url}: {status}: {}", response.text().await?).into());
    }
    Ok(())
}
